// Attends of one layer on a GPU over random rows: where their time goes.
//
// Gaussian keys and values say nothing of how many rows an error bound needs,
// so the policies here have fixed budgets. Every configuration's output is
// compared with weighted attention in fp64 over the rows that Select names
// before it is timed; the GPU's caches are flushed before each attend. Writes
// one JSON object a line.
#include <cuda_runtime_api.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <future>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gpu/cuda/buffer.h"
#include "gpu/device/cuda_device.h"
#include "nlohmann/json.hpp"
#include "tbb/parallel_for.h"

namespace spillway::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kChunk = 32768;

// Four nearly normal numbers from a counter, cheaply: sums of bytes of two
// mixed words.
uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}
float Normal(uint64_t counter) {
  const uint64_t x = Mix(counter);
  int sum = 0;
  for (int i = 0; i < 8; ++i) sum += static_cast<int>(x >> (8 * i) & 0xFF);
  return (static_cast<float>(sum) - 1020.0f) / 209.0f;
}
uint16_t BF16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
float FromBF16(const std::byte* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  const uint32_t bits = uint32_t{half} << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

class Bench {
 public:
  // Measures what has `only` in its name.
  Bench(ModelSpec spec, int64_t token_max, std::string only)
      : spec_(spec),
        only_(std::move(only)),
        budget_(token_max * spec.kv_head_count * spec.row_bytes() + (4ll << 30)) {
    device_ = CreateCudaDevice({}, &budget_).value();
    Arena::ChunkObserver observer;
    observer.committed = [this](std::span<std::byte> chunk) {
      const auto begin = std::chrono::steady_clock::now();
      absl::Status status = device_->RegisterMemory(chunk);
      pin_seconds_ +=
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      return status;
    };
    observer.released = [this](std::span<std::byte> c) { device_->UnregisterMemory(c); };
    ArenaOptions options;
    options.limit_bytes = budget_.limit_bytes() - (1ll << 30);
    options.chunk_bytes = int64_t{256} << 20;
    arena_ = Arena::Create(options, &budget_, observer).value();
    pool_ = std::make_unique<PagePool>(arena_.get(), kPageTokenCount * spec_.row_bytes());
    model_ = device_->CreateModel(spec_, {}).value();
    sequence_ = device_->CreateSequence(*model_).value();
    rows_ = std::make_unique<LayerRows>(pool_.get(), spec_);
    flush_ = cuda::DeviceBuffer::Create(int64_t{256} << 20, &flush_budget_, "flush").value();
  }
  ~Bench() {
    rows_.reset();
    sequence_.reset();
    model_.reset();
    pool_.reset();
    arena_.reset();
  }

  void AppendTo(int64_t n) {
    std::vector<uint16_t> k, v;
    double seconds = 0, device_us = 0;
    const int64_t first = rows_->token_count();
    while (rows_->token_count() < n) {
      const int64_t start = rows_->token_count();
      const int64_t count = std::min(kChunk, n - start);
      const int d = spec_.head_dim;
      const int64_t size = count * d * spec_.kv_head_count;
      k.resize(size);
      v.resize(size);
      tbb::parallel_for(int64_t{0}, count * spec_.kv_head_count, [&](int64_t r) {
        const uint64_t base = static_cast<uint64_t>((start * 64 + r) * 2 * d);
        for (int i = 0; i < d; ++i) {
          k[r * d + i] = BF16(Normal(base + i));
          v[r * d + i] = BF16(Normal(base + d + i));
        }
      });
      const auto begin = std::chrono::steady_clock::now();
      Check(rows_->PrepareAppend(count));
      Check(device_->PrepareAppend(*model_, *sequence_, 0, start, count));
      JobItem item;
      item.append =
          AppendWork{rows_.get(), start, count, reinterpret_cast<const std::byte*>(k.data()),
                     reinterpret_cast<const std::byte*>(v.data())};
      const auto job = Run(std::move(item), false);
      Check(job->items[0].status);
      seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      device_us += job->device_time_us;
    }
    const double bytes = static_cast<double>((n - first) * spec_.kv_head_count * spec_.row_bytes());
    Print({{"name", "append"},
           {"tokens", n - first},
           {"seconds", seconds},
           {"device_seconds", device_us * 1e-6},
           {"gb_per_s", bytes / seconds * 1e-9},
           {"pin_seconds", pin_seconds_}});
    pin_seconds_ = 0;
  }

  // Logits have about this standard deviation: 1 is a flat softmax, at 5 few
  // keys take most of it.
  std::vector<float> Query(uint64_t seed, double spread) const {
    std::vector<float> q(spec_.query_head_count * spec_.head_dim);
    for (size_t i = 0; i < q.size(); ++i) {
      q[i] = static_cast<float>(spread) * Normal(seed * 1000003 + i);
    }
    return q;
  }

  JobItem AttendItem(const Policy& policy, const std::vector<float>& q, int64_t n, bool select) {
    AttendWork work;
    work.rows = rows_.get();
    work.policy = policy;
    work.q = reinterpret_cast<const std::byte*>(q.data());
    work.query_count = 1;
    work.visible = {n};
    work.select_only = select;
    JobItem item;
    item.attend = std::move(work);
    return item;
  }

  // The largest relative error of an output against the rows that it names.
  double Verify(const Policy& policy, double spread, int64_t n) {
    const std::vector<float> q = Query(7, spread);
    const auto attend = Run(AttendItem(policy, q, n, false), false);
    const auto select = Run(AttendItem(policy, q, n, true), false);
    Check(attend->items[0].status);
    Check(select->items[0].status);
    const int d = spec_.head_dim;
    std::vector<double> errors(spec_.query_head_count);
    tbb::parallel_for(0, spec_.query_head_count, [&](int h) {
      const int kv_head = h / spec_.group();
      const Selection& s = select->items[0].attend->selections[kv_head];
      std::vector<double> out(d, 0.0);
      double sum = 0, max = -1e300;
      std::vector<double> logits;
      for (size_t i = 0; i < s.indices.size(); ++i) {
        const std::byte* row = rows_->Row(kv_head, s.indices[i]);
        double l = 0;
        for (int j = 0; j < d; ++j) l += double{q[h * d + j]} * FromBF16(row + 2 * j);
        logits.push_back(l * spec_.softmax_scale + s.log_weights[i]);
        max = std::max(max, logits.back());
      }
      for (size_t i = 0; i < s.indices.size(); ++i) {
        const std::byte* row = rows_->Row(kv_head, s.indices[i]);
        const double x = std::exp(logits[i] - max);
        sum += x;
        for (int j = 0; j < d; ++j) out[j] += x * FromBF16(row + 2 * (d + j));
      }
      double error = 0, norm = 0;
      for (int j = 0; j < d; ++j) {
        const double wanted = out[j] / sum;
        error += std::pow(attend->items[0].attend->out[h * d + j] - wanted, 2);
        norm += wanted * wanted;
      }
      errors[h] = std::sqrt(error / norm);
    });
    return *std::max_element(errors.begin(), errors.end());
  }

  void Measure(const std::string& name, const Policy& policy, double spread, int64_t n,
               int repetitions) {
    if (name.find(only_) == std::string::npos) return;
    const double error = Verify(policy, spread, n);
    if (!(error < 1e-4)) {
      std::cerr << name << " at " << n << ": wrong by " << error << "\n";
      std::exit(1);
    }
    std::vector<double> totals;
    std::map<std::string, std::vector<double>> stages;
    std::vector<std::string> order;
    int64_t touched = 0;
    for (int i = 0; i < 2 * repetitions; ++i) {
      cudaMemset(flush_.data(), i, static_cast<size_t>(flush_.bytes()));
      cudaDeviceSynchronize();
      const bool trace = i % 2 == 1;
      const std::vector<float> q = Query(100 + i, spread);
      const auto job = Run(AttendItem(policy, q, n, false), trace);
      Check(job->items[0].status);
      if (!trace) {
        totals.push_back(job->device_time_us);
        touched = 0;
        for (int64_t t : job->items[0].attend->touched_row_counts) touched += t;
        continue;
      }
      for (const StageTime& stage : job->stages) {
        if (stages.count(stage.name) == 0) order.push_back(stage.name);
        stages[stage.name].push_back(stage.us);
      }
    }
    Json times = Json::object();
    for (const std::string& stage : order) times[stage] = Median(stages[stage]);
    Print({{"name", name},
           {"tokens", n},
           {"us", Median(totals)},
           {"rows", touched},
           {"row_bytes", touched * spec_.row_bytes()},
           {"checked_error", error},
           {"stages", times}});
  }

 private:
  static void Check(const absl::Status& status) {
    if (status.ok()) return;
    std::cerr << status << "\n";
    std::exit(1);
  }
  static double Median(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
  }
  static void Print(const Json& json) { std::cout << json.dump() << std::endl; }

  std::unique_ptr<Job> Run(JobItem item, bool trace) {
    item.sequence = sequence_.get();
    auto job = std::make_unique<Job>();
    job->model = model_.get();
    job->trace = trace;
    job->items.push_back(std::move(item));
    std::promise<std::unique_ptr<Job>> done;
    device_->Submit(std::move(job),
                    [&](std::unique_ptr<Job> finished) { done.set_value(std::move(finished)); });
    return done.get_future().get();
  }

  const ModelSpec spec_;
  const std::string only_;
  MemoryBudget budget_;
  MemoryBudget flush_budget_{int64_t{1} << 30};
  std::unique_ptr<Device> device_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<DeviceModel> model_;
  std::unique_ptr<DeviceSequence> sequence_;
  std::unique_ptr<LayerRows> rows_;
  cuda::DeviceBuffer flush_;
  double pin_seconds_ = 0;
};

int Main(int argc, char** argv) {
  CLI::App app{"Attends of one layer on a GPU over random rows"};
  std::vector<int64_t> lengths = {131072, 524288, 1048576};
  int repetitions = 15;
  std::string only;
  app.add_option("--tokens", lengths, "lengths, ascending");
  app.add_option("--repetitions", repetitions, "of each measurement");
  app.add_option("--only", only, "measurements whose name holds this");
  CLI11_PARSE(app, argc, argv);
  ModelSpec spec;
  spec.layer_count = 1;
  spec.query_head_count = 32;
  spec.kv_head_count = 8;
  spec.head_dim = 128;
  spec.dtype = DType::kBF16;
  Normalize(spec);
  Bench bench(spec, lengths.back(), only);
  for (const int64_t n : lengths) {
    bench.AppendTo(n);
    Policy top;  // a fixed budget, no tail
    top.tail = Tail::kNone;
    bench.Measure("asymmetric top 256", top, 1, n, repetitions);
    Policy share = top;
    share.heavy_kind = HeavyKind::kFraction;
    share.heavy_fraction = 0.02;
    bench.Measure("asymmetric top 2 %", share, 1, n, repetitions);
    share.selector = Selector::kHamming;
    bench.Measure("hamming top 2 %", share, 1, n, repetitions);
    Policy limited;
    limited.row_count_max = 2500;
    bench.Measure("stratified, 2,500 rows", limited, 1, n, repetitions);
    bench.Measure("default policy, peaked", Policy(), 5, n, repetitions);
    Policy pilot;  // an error bound that the pilot meets
    pilot.epsilon = 0.999;
    pilot.inflation = 1;
    bench.Measure("default policy, pilot only", pilot, 5, n, repetitions);
  }
  return 0;
}

}  // namespace
}  // namespace spillway::bench

int main(int argc, char** argv) { return spillway::bench::Main(argc, argv); }

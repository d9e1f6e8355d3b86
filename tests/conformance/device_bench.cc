#include "tests/conformance/device_bench.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <string_view>
#include <utility>

#include "host/cpu/cpu_device.h"
#include "host/policy/methods.h"
#ifdef SPILLWAY_HAS_CUDA
#include "gpu/device/cuda_device.h"
#endif
#include "host/base/status_macros.h"
#include "tests/reference/elements.h"

namespace spillway {

const std::vector<DeviceFactory>& DeviceFactories() {
  static const auto* factories = [] {
    auto* all = new std::vector<DeviceFactory>{
        {"cpu", [](int thread_count, Arena* arena, MemoryBudget* budget) {
           return CreateCpuDevice({thread_count}, arena, budget);
         }}};
#ifdef SPILLWAY_HAS_CUDA
    // A few GiB are enough for every test, and leave memory for tests side by side.
    if (!ListCudaDevices().empty()) {
      all->push_back({"cuda", [](int thread_count, Arena*, MemoryBudget* budget) {
                        return CreateCudaDevice({.memory_limit_bytes = int64_t{4} << 30,
                                                 .thread_count = thread_count},
                                                budget)
                            .value();
                      }});
      // The same device with all rows of all sequences in GPU memory.
      all->push_back({"cuda_resident", [](int thread_count, Arena*, MemoryBudget* budget) {
                        return CreateCudaDevice({.memory_limit_bytes = int64_t{4} << 30,
                                                 .resident_limit_bytes = int64_t{2} << 30,
                                                 .reproducible = true,
                                                 .thread_count = thread_count},
                                                budget)
                            .value();
                      }});
    }
#endif
    return all;
  }();
  return *factories;
}

const DeviceFactory& ChosenDevice() {
  const char* name = std::getenv("SPILLWAY_TEST_DEVICE");
  if (name == nullptr) return DeviceFactories().front();
  for (const DeviceFactory& factory : DeviceFactories()) {
    if (factory.name == name) return factory;
  }
  std::fprintf(stderr, "SPILLWAY_TEST_DEVICE: there is no device \"%s\"\n", name);
  std::exit(1);
}

ModelSpec MakeSpec(int kv_head_count, int group, int head_dim, DType dtype, HashSpec hash) {
  ModelSpec spec;
  spec.layer_count = 1;
  spec.kv_head_count = kv_head_count;
  spec.query_head_count = kv_head_count * group;
  spec.head_dim = head_dim;
  spec.dtype = dtype;
  spec.hash = hash;
  Normalize(spec);
  return spec;
}

bool IsBuilt(const Policy& policy) {
  if (FindMethod(policy.selector) == nullptr || FindMethod(policy.tail) == nullptr) return false;
  return !policy.candidate_selector.has_value() ||
         (HasFirstSelection() && FindMethod(*policy.candidate_selector) != nullptr);
}

DeviceBench::DeviceBench(const DeviceFactory& factory, const ModelSpec& spec, int thread_count,
                         std::span<const std::byte> safetensors)
    : spec_(spec), budget_(int64_t{2} << 30) {
  ArenaOptions options;
  options.limit_bytes = int64_t{1} << 30;
  options.extent_bytes = int64_t{8} << 20;
  Arena::ExtentObserver observer;
  observer.committed = [this](std::span<std::byte> extent) {
    return device_->RegisterMemory(extent);
  };
  observer.released = [this](std::span<std::byte> extent) { device_->UnregisterMemory(extent); };
  arena_ = Arena::Create(options, &budget_, observer).value();
  device_ = factory.create(thread_count, arena_.get(), &budget_);
  model_ = device_->CreateModel(spec_, safetensors).value();
  row_pool_ = std::make_unique<PagePool>(arena_.get(), kPageTokenCount * spec_.row_bytes());
}

DeviceBench::~DeviceBench() {
  row_pool_.reset();
  model_.reset();
  // The arena unregisters its extents with the device, which must still exist. The CPU device's
  // codes, which are in the arena, are gone with the model.
  arena_.reset();
}

std::unique_ptr<Job> DeviceBench::Run(std::unique_ptr<Job> job) {
  std::promise<std::unique_ptr<Job>> done;
  job->model = model_.get();
  device_->Submit(std::move(job),
                  [&](std::unique_ptr<Job> finished) { done.set_value(std::move(finished)); });
  return done.get_future().get();
}

BenchSequence::BenchSequence(DeviceBench& bench, std::unique_ptr<DeviceSequence> sequence)
    : bench_(&bench), device_sequence_(std::move(sequence)) {}

BenchSequence::BenchSequence(DeviceBench& bench)
    : BenchSequence(bench, bench.device().CreateSequence(bench.model()).value()) {
  for (int l = 0; l < bench.spec().layer_count; ++l) {
    rows_.push_back(std::make_unique<LayerRows>(bench.row_pool(), bench.spec()));
  }
}

JobItem BenchSequence::RunOne(JobItem item, int layer) {
  auto job = std::make_unique<Job>();
  job->layer = layer;
  job->items.push_back(std::move(item));
  return std::move(bench_->Run(std::move(job))->items[0]);
}

namespace {

// K or V of tokens [start, start + count), as [H][count][d] in the spec's dtype.
std::vector<std::byte> Slice(const reference::Context& context, const std::vector<float>& all,
                             int64_t start, int64_t count) {
  const ModelSpec& spec = context.spec;
  std::vector<float> part;
  for (int h = 0; h < spec.kv_head_count; ++h) {
    const auto head = all.begin() + (h * context.n + start) * spec.head_dim;
    part.insert(part.end(), head, head + count * spec.head_dim);
  }
  return reference::Bytes(spec.dtype, part);
}

}  // namespace

absl::Status BenchSequence::PrepareAppend(int64_t count, int layer) {
  const int64_t start = token_count(layer);
  RETURN_IF_ERROR(rows_[layer]->PrepareAppend(count));
  return bench_->device().PrepareAppend(bench_->model(), *device_sequence_, layer, start, count);
}

absl::Status BenchSequence::Append(const reference::Context& context, int64_t from, int64_t to,
                                   int64_t chunk, int layer) {
  const int64_t step = chunk == 0 ? to - from : chunk;
  for (int64_t start = from; start < to; start += step) {
    const int64_t count = std::min(step, to - start);
    const std::vector<std::byte> k = Slice(context, context.k, start, count);
    const std::vector<std::byte> v = Slice(context, context.v, start, count);
    absl::Status status = PrepareAppend(count, layer);
    if (!status.ok()) return status;
    JobItem item;
    item.sequence = device_sequence_.get();
    item.append = AppendWork::Dense(rows_[layer].get(), start, count, k.data(), v.data());
    status = RunOne(std::move(item), layer).status;
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

JobItem BenchSequence::StepItem(const reference::Context& context, const Policy& policy,
                                const std::vector<float>& q) {
  const int64_t start = token_count();
  const auto count =
      static_cast<int64_t>(q.size()) / (context.spec.query_head_count * context.spec.head_dim);
  step_k_ = Slice(context, context.k, start, count);
  step_v_ = Slice(context, context.v, start, count);
  std::vector<int64_t> visible;
  for (int64_t t = 0; t < count; ++t) visible.push_back(start + t + 1);
  JobItem item = AttendItem(policy, q, /*select_only=*/false, std::move(visible));
  item.status = PrepareAppend(count, 0);
  if (!item.status.ok()) return item;
  item.append = AppendWork::Dense(rows_[0].get(), start, count, step_k_.data(), step_v_.data());
  return item;
}

JobItem BenchSequence::Step(const reference::Context& context, const Policy& policy,
                            const std::vector<float>& q) {
  const int64_t start = token_count();
  JobItem item = StepItem(context, policy, q);
  if (!item.status.ok()) return item;
  item = RunOne(std::move(item), 0);
  if (!item.status.ok()) rows_[0]->Truncate(start);
  return item;
}

BenchSequence BenchSequence::Fork(int64_t token_count) {
  BenchSequence fork(
      *bench_,
      bench_->device().ForkSequence(bench_->model(), *device_sequence_, token_count).value());
  for (const auto& rows : rows_) {
    fork.rows_.push_back(std::make_unique<LayerRows>(rows->Share(token_count)));
  }
  return fork;
}

void BenchSequence::Truncate(int64_t token_count) {
  bench_->device().TruncateSequence(bench_->model(), *device_sequence_, token_count);
  for (const auto& rows : rows_) rows->Truncate(token_count);
}

JobItem BenchSequence::AttendItem(const Policy& policy, const std::vector<float>& q,
                                  bool select_only, std::vector<int64_t> visible, int layer) {
  const ModelSpec& spec = bench_->spec();
  AttendQuery attend;
  attend.rows = rows_[layer].get();
  attend.policy = policy;
  attend.q = reinterpret_cast<const std::byte*>(q.data());
  attend.query_count = static_cast<int64_t>(q.size()) / (spec.query_head_count * spec.head_dim);
  for (int64_t t = 0; visible.empty() && t < attend.query_count; ++t) {
    attend.visible.push_back(token_count(layer) - attend.query_count + 1 + t);
  }
  if (!visible.empty()) attend.visible = std::move(visible);
  attend.select_only = select_only;
  JobItem item;
  item.sequence = device_sequence_.get();
  item.attend = std::move(attend);
  return item;
}

JobItem BenchSequence::Attend(const Policy& policy, const std::vector<float>& q,
                              std::vector<int64_t> visible, int layer) {
  return RunOne(AttendItem(policy, q, false, std::move(visible), layer), layer);
}

JobItem BenchSequence::Select(const Policy& policy, const std::vector<float>& q,
                              std::vector<int64_t> visible, int layer) {
  return RunOne(AttendItem(policy, q, true, std::move(visible), layer), layer);
}

std::span<const float> OutputOf(const ModelSpec& spec, const AttendResult& result, int64_t t,
                                int h) {
  return {result.out.data() + (t * spec.query_head_count + h) * spec.head_dim,
          static_cast<size_t>(spec.head_dim)};
}

}  // namespace spillway

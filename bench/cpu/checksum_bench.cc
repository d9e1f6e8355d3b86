// Measures what the checksums of rows that outlive the process cost (host/memory/row_sums.cc): one
// layer of 8 KV heads, head_dim 128, float16. Appends to rows with a record and to rows without one
// take turns, so that other work of the machine affects both: long appends with all cores, and
// decode steps of one token. Then all full pages are compared with their checksums, as at a start.
// Prints one JSON object, with the median of each and of the ratios of neighbours.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <iostream>
#include <vector>

#include "host/device/append_rows.h"
#include "host/memory/layer_record.h"
#include "host/memory/row_check.h"
#include "nlohmann/json.hpp"

namespace spillway::bench {
namespace {

constexpr int kHeads = 8;
constexpr int kHeadDim = 128;

double Seconds(const std::function<void()>& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

ModelSpec Spec() {
  ModelSpec spec;
  spec.layer_count = 1;
  spec.query_head_count = spec.kv_head_count = kHeads;
  spec.head_dim = kHeadDim;
  spec.dtype = DType::kF16;
  return spec;
}

// Appends `count` tokens of the same source.
void Append(LayerRows& rows, const std::vector<std::byte>& source, int64_t count) {
  AppendWork work;
  work.rows = &rows;
  work.start = rows.token_count();
  work.count = count;
  work.k = work.v = RowSource::Dense(source.data(), count, kHeadDim * 2);
  const bool ok = rows.PrepareAppend(count).ok() && AppendRows(Spec(), 0, work).ok();
  if (!ok) throw std::runtime_error("an append failed");
  rows.Keep(rows.token_count());
}

int Run(const std::string& folder, int64_t token_count, int repetitions) {
  MemoryBudget budget(int64_t{16} << 30);
  const ArenaFolder arena_folder = *ArenaFolder::Open(folder);
  const auto file = *RecordFile::Open(*ArenaFile::Open(arena_folder, "records"), 1, &budget);
  file->FreeUnclaimed();
  ArenaOptions options;
  options.limit_bytes = int64_t{8} << 30;
  const auto arena = *Arena::Create(options, &budget);
  PagePool pool(arena.get(), kPageTokenCount * Spec().row_bytes());
  LayerRows plain(&pool, Spec()), kept(&pool, Spec());
  LayerRecord record = *LayerRecord::Create(file.get(), kHeads);
  if (!kept.Record(&record).ok()) throw std::runtime_error("no record");

  std::vector<std::byte> source(static_cast<size_t>(kHeads * token_count * kHeadDim * 2));
  for (size_t i = 0; i < source.size(); ++i)
    source[i] = static_cast<std::byte>(i * 2654435761 >> 9);
  struct Times {
    std::vector<double> plain, kept, ratio;
    void Add(double p, double k) {
      plain.push_back(p);
      kept.push_back(k);
      ratio.push_back(k / p);
    }
  } appends, steps;
  // The first append of each also commits memory.
  for (int i = 0; i <= repetitions; ++i) {
    plain.Truncate(0);
    kept.Truncate(0);
    const double p = Seconds([&] { Append(plain, source, token_count); });
    const double k = Seconds([&] { Append(kept, source, token_count); });
    if (i > 0) appends.Add(p, k);
  }
  constexpr int kSteps = 256;  // of which two fill a page
  for (int i = 0; i < repetitions * 4; ++i) {
    const double p = Seconds([&] {
      for (int step = 0; step < kSteps; ++step) Append(plain, source, 1);
    });
    const double k = Seconds([&] {
      for (int step = 0; step < kSteps; ++step) Append(kept, source, 1);
    });
    steps.Add(p / kSteps, k / kSteps);
  }
  std::vector<double> checks;
  const int64_t length = kept.token_count();
  for (int i = 0; i < repetitions; ++i) {
    checks.push_back(Seconds([&] {
      RowCheck check;
      check.Add(kept, length);
      check.Run();
      if (check.Find(kept, record, length).token_count != length) {
        throw std::runtime_error("damage was found where there is none");
      }
    }));
  }
  const double row_bytes = static_cast<double>(kHeads * Spec().row_bytes());
  const double gb = static_cast<double>(token_count) * row_bytes / 1e9;
  const nlohmann::ordered_json found = {
      {"row_bytes", token_count * kHeads * Spec().row_bytes()},
      {"repetitions", repetitions},
      {"append_gb_s_without", gb / Median(appends.plain)},
      {"append_gb_s_with", gb / Median(appends.kept)},
      {"append_time_ratio", Median(appends.ratio)},
      {"step_us_without", 1e6 * Median(steps.plain)},
      {"step_us_with", 1e6 * Median(steps.kept)},
      {"step_us_more", 1e6 * (Median(steps.kept) - Median(steps.plain))},
      {"check_gb_s", static_cast<double>(length) * row_bytes / 1e9 / Median(checks)}};
  std::cout << found.dump(1) << std::endl;
  return 0;
}

}  // namespace
}  // namespace spillway::bench

int main(int argc, char** argv) {
  CLI::App app{"The cost of checksums of rows that outlive the process."};
  std::string folder = "/dev/shm/spillway-checksum-bench";
  int64_t token_count = 65536;
  int repetitions = 9;
  app.add_option("--folder", folder, "a new folder in tmpfs, which is removed at the end");
  app.add_option("--tokens", token_count)->check(CLI::Range(1024, 1 << 20));
  app.add_option("--repetitions", repetitions)->check(CLI::Range(1, 1000));
  CLI11_PARSE(app, argc, argv);
  const int status = spillway::bench::Run(folder, token_count, repetitions);
  std::filesystem::remove_all(folder);
  return status;
}

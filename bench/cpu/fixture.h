#pragma once

#include <tbb/task_arena.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/cpu/plain_read.h"
#include "host/cpu/cpu_device.h"
#include "host/memory/page_pool.h"

namespace spillway::bench {

// One layer of one sequence on a CPU device, without a daemon. Not thread-safe.
class Fixture {
 public:
  // thread_count 0: one thread per core. memory_bytes: the limit on rows, codes and workspaces
  // together.
  static absl::StatusOr<std::unique_ptr<Fixture>> Create(ModelSpec spec, int thread_count,
                                                         int64_t memory_bytes);

  // Appends tokens [from, to) of K and V, each [H_kv][tokens][d] in the
  // model's dtype.
  absl::Status Append(const std::byte* k, const std::byte* v, int64_t tokens, int64_t from,
                      int64_t to);

  struct Attended {
    AttendResult result;
    double device_time_us = 0;
  };
  // One query [H_q][d] fp32 over the first `visible` tokens.
  absl::StatusOr<Attended> Attend(const Policy& policy, const float* q, int64_t visible);

  // PlainReadSeconds for the rows of the first token_count tokens of every KV head, with as many
  // threads as the device has.
  double ReadRows(int64_t token_count, CacheFlush& flush);

  Device& device() { return *device_; }
  DeviceModel& model() { return *model_; }
  DeviceSequence& sequence() { return *sequence_; }
  LayerRows& rows() { return *rows_; }
  MemoryBudget& budget() { return budget_; }
  Arena& arena() { return *arena_; }
  // As many threads as the device has, for work that is compared with the device's.
  tbb::task_arena& threads() { return threads_; }

 private:
  explicit Fixture(int64_t memory_bytes) : budget_(memory_bytes) {}
  std::unique_ptr<Job> Run(std::unique_ptr<Job> job);

  MemoryBudget budget_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<LayerRows> rows_;
  std::unique_ptr<DeviceModel> model_;
  std::unique_ptr<DeviceSequence> sequence_;
  tbb::task_arena threads_;
};

}  // namespace spillway::bench

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/cuda/buffer.h"
#include "host/device/device.h"
#include "host/memory/page_pool.h"

namespace spillway::bench {

// Parameters of one attend: q [H_q][d] fp32, over the first `visible` tokens.
struct AttendRequest {
  Policy policy;
  std::vector<float> q;
  int64_t visible = 0;
  // K and V of one token, each [H_kv][d], which the same job appends first; null: no append.
  const std::byte* k = nullptr;
  const std::byte* v = nullptr;
};

// One layer of one sequence on a CUDA device, without a daemon. Not thread-safe.
class GpuFixture {
 public:
  // Has room for token_max tokens. REQUIRES: spec is normalized.
  static absl::StatusOr<std::unique_ptr<GpuFixture>> Create(const ModelSpec& spec,
                                                            int64_t token_max);
  ~GpuFixture();

  struct Appended {
    double seconds = 0;
    double device_seconds = 0;
    double pin_seconds = 0;  // the part of `seconds` that was spent on pinning memory
  };
  // Appends `count` tokens of K and V, each [H_kv][count][d] in the model's
  // dtype.
  absl::StatusOr<Appended> Append(const std::byte* k, const std::byte* v, int64_t count);

  struct Attended {
    AttendResult result;
    double device_time_us = 0;
    std::vector<StageTime> stages;  // only with kTrace
  };
  enum class Mode : uint8_t { kPlain, kTrace, kSelect };
  absl::StatusOr<Attended> Attend(const AttendRequest& request, Mode mode);

  // After this, the next measurement starts with cold caches of the GPU.
  absl::Status FlushCaches();

  const ModelSpec& spec() const { return spec_; }
  const LayerRows& rows() const { return *rows_; }

 private:
  GpuFixture(const ModelSpec& spec, int64_t token_max);
  absl::Status Initialize();
  absl::Status PrepareAppend(int64_t count);
  std::unique_ptr<Job> Run(JobItem item, bool trace);

  const ModelSpec spec_;
  MemoryBudget budget_;
  MemoryBudget flush_budget_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<DeviceModel> model_;
  std::unique_ptr<DeviceSequence> sequence_;
  std::unique_ptr<LayerRows> rows_;
  cuda::DeviceBuffer flush_;
  double pin_seconds_ = 0;
};

}  // namespace spillway::bench

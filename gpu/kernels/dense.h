#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "gpu/kernels/step.h"
#include "host/base/host_device.h"
#include "host/base/row_format.h"

// What the kernels of a dense attend share: one that reads all rows.
namespace spillway::cuda {

inline constexpr int kDenseQueryRows = 16;  // (query, head of the group) pairs

// What the host reads of a dense unit; in pinned memory.
struct DenseResult {
  uint32_t error_token = kNoToken;
  StepReport report;  // its heads are query rows
};
static_assert(kDenseQueryRows <= kStepReportHeads);

// Rows of a split of staged rows.
inline constexpr int64_t kStagedSplitRows = 2048;

// Dense attention of up to kDenseQueryRows query rows of one KV head over all of its rows.
struct DenseUnit {
  UnitPlace place{};  // of the first query
  const std::byte* const* row_pages = nullptr;
  const float* q = nullptr;      // [rows][d], rows = queries * G; null: the wave's step.q
  const float* sinks = nullptr;  // [G] sink logits; null: there are none
  int32_t query_rows = 0;
  int64_t visible[kDenseQueryRows] = {};  // tokens that each query row sees
  int64_t n = 0;                          // the largest of them
  // Staged rows are in splits of kStagedSplitRows that follow each other, others in splits of
  // tiles.
  bool staged = false;
  bool over_link = false;   // whether many rows of the wave are read from host memory
  int32_t first_split = 0;  // splits of the wave's units before this one
  int64_t split_count = 0;
  float* partials = nullptr;  // [split_count] of query_rows * (2 + d) floats
  uint32_t* error_token = nullptr;
  float* out = nullptr;           // pinned, [query_rows][d]; null: to the wave's step.out
  float* lse = nullptr;           // pinned, [query_rows]
  DenseResult* result = nullptr;  // pinned
};

// Whether units with so many query rows that read their rows in place are folded by warps
// (dense_warp.cuh). Others have other bits, so a launch has units of one kind.
inline constexpr int kDenseWarpHeads = 8;
SPILLWAY_HOST_DEVICE inline bool DenseByWarps(const RowFormat& format, int query_rows) {
  return format.type == RowType::kElements && format.dtype != DType::kF32 &&
         (format.head_dim == 64 || format.head_dim == 128) && query_rows <= kDenseWarpHeads;
}

struct DenseWave {
  DType dtype = DType::kBF16;
  int head_dim = 0;
  int group = 0;
  RowType row_type = RowType::kElements;
  int64_t row_bytes = 0;  // of a stored row
  float scale = 1;
  const DenseUnit* units = nullptr;  // device
  int unit_count = 0;
  int query_rows_max = 0;  // of the units
  bool by_warps = false;   // DenseByWarps() of all units
  int sm_count = 0;
  int block_shared_bytes = 0;  // as in Wave
  // The launch folds rows [first, limit); page 0 of the units' tables begins with row `first`. Both
  // are multiples of kStagedSplitRows, or the launch covers all rows.
  int64_t first = 0;
  int64_t limit = 0;
  int64_t split_count_max = 0;  // of a unit in one launch
  int link_workers = 0;         // blocks or warps that run if rows come over the link
  // Pinned; the work stops when it is not 0. Null: it never stops.
  const int32_t* cancel = nullptr;
  uint32_t* running = nullptr;  // device, not 0 at first; 0 once a block has seen that it stops
  // Whether a kernel may begin while the one before still runs (compute capability 9.0): the finish
  // during the fold, and the fold during the append of a step, if nothing is between them.
  bool overlap = false;
  bool follows_append = false;
  CallerTensors step;

  SPILLWAY_HOST_DEVICE RowFormat format() const { return {dtype, row_type, head_dim}; }
  bool operator==(const DenseWave&) const = default;
};

// Copies pages of rows to one contiguous buffer: page p of head h from
// from[h * capacity + p] to to + (h * page_count + p) * page_bytes.
cudaError_t LaunchStagePages(const std::byte* const* from, int64_t capacity, int head_count,
                             int64_t page_count, int64_t page_bytes, std::byte* to,
                             cudaStream_t stream);
cudaError_t LaunchDenseFold(const DenseWave& wave, cudaStream_t stream);
cudaError_t LaunchDenseFinish(const DenseWave& wave, cudaStream_t stream);

}  // namespace spillway::cuda

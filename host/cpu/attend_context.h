#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "host/cpu/cpu_state.h"
#include "host/cpu/stage_clock.h"
#include "host/cpu/workspace.h"
#include "host/device/device.h"
#include "host/device/job_loops.h"

namespace spillway {

// State that the parts of one attend on the CPU share.
struct AttendContext {
  const ModelSpec* shapes = nullptr;
  const CpuModel* model = nullptr;    // null: only dense attention is possible
  const LayerIndex* index = nullptr;  // null: the model has no index
  int layer = 0;
  const AttendQuery* attend = nullptr;
  AttendResult* result = nullptr;
  const CancelToken* cancel = nullptr;  // may be null
  WorkspacePool* workspaces = nullptr;
  JobLoops loops;

  const ModelSpec& spec() const { return *shapes; }
  absl::Status CheckCancelled() const {
    return cancel == nullptr ? absl::OkStatus() : cancel->Check();
  }
  // Lets short jobs go first, then checks for cancellation. REQUIRES: the caller holds no
  // workspace. The work that runs meanwhile takes one, and a thread may hold only one at a time.
  absl::Status Pause() const {
    loops.Pause();
    return CheckCancelled();
  }
};

// Queries of neighbouring query heads, [T][heads][d], in the forms that the kernels read.
class GroupQueries {
 public:
  GroupQueries() = default;
  // Of query heads [first_head, first_head + head_count).
  GroupQueries(const AttendContext& context, int first_head, int head_count, int64_t query_begin,
               int64_t query_end);

  const float* raw() const { return raw_.data(); }
  RowQueries rows() const;

 private:
  int head_dim_ = 0;
  float scale_ = 1;
  std::vector<float> raw_;
  std::vector<float> scaled_;
  std::vector<uint16_t> bf16_;  // empty if an element is no bf16 number
};

// OUT_OF_RANGE names the first of the `count` tokens whose logit is not finite; OK: all are finite.
absl::Status NonFiniteLogit(const AttendContext& context, int kv_head, const float* logits,
                            const uint32_t* tokens, int count);

// Exact attention of queries [query_begin, query_end) over every visible token. Fills certificates,
// touched row counts, out and lse; with select_only, it fills the selections (every token) instead
// of out and lse.
absl::Status AttendDense(const AttendContext& context, int64_t query_begin, int64_t query_end);

// Selection, sampling and attention of one query and one group; fills that part of the result.
// clock measures the stages; may be null.
absl::Status AttendSparse(const AttendContext& context, int64_t query, int group_index,
                          StageClock* clock = nullptr);

}  // namespace spillway

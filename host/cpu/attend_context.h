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

// What the parts of one attend on the CPU share.
struct AttendContext {
  const ModelSpec* shapes = nullptr;
  const CpuModel* model = nullptr;    // null: dense attention alone
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
  // Lets short jobs go first; then as CheckCancelled(). REQUIRES: the caller holds no workspace:
  // what it runs meanwhile takes one, and a thread is to have one at a time.
  absl::Status Pause() const {
    loops.Pause();
    return CheckCancelled();
  }
};

// The queries of one KV head's group, [T][G][d], in the forms that kernels
// read.
class GroupQueries {
 public:
  GroupQueries() = default;
  GroupQueries(const AttendContext& context, int kv_head, int64_t query_begin, int64_t query_end);

  const float* raw() const { return raw_.data(); }
  RowQueries rows() const;

 private:
  int head_dim_ = 0;
  float scale_ = 1;
  std::vector<float> raw_;
  std::vector<float> scaled_;
  std::vector<uint16_t> bf16_;  // empty where an element is no bf16 number
};

// OUT_OF_RANGE naming the first token of the block whose logit is not finite.
absl::Status NonFiniteLogit(const AttendContext& context, int kv_head, const float* logits,
                            const uint32_t* tokens, int count);

// Exact attention of queries [query_begin, query_end) over every visible
// token; fills out, lse, certificates, touched rows (and, with select_only,
// the selections: every token).
absl::Status AttendDense(const AttendContext& context, int64_t query_begin, int64_t query_end);

// Selection, sampling and attention of one query and one KV head; fills that
// part of the result. clock: told of the stages; null: none.
absl::Status AttendSparse(const AttendContext& context, int64_t query, int kv_head,
                          StageClock* clock = nullptr);

}  // namespace spillway

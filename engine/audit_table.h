#pragma once

#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "host/base/mutex.h"
#include "host/model/model_spec.h"

namespace spillway {

// Audit results of one KV head of a layer, and its escalation level. One check is of the output of
// one query head for one query.
struct HeadAudit {
  int layer = 0;
  int kv_head = 0;
  int level = 0;  // see host/policy/escalation.h
  int64_t check_count = 0;
  int64_t violation_count = 0;
  // Since the level was last changed or confirmed.
  int64_t recent_check_count = 0;
  int64_t recent_violation_count = 0;
};

// The audits of a model's heads. Thread-safe.
class AuditTable {
 public:
  explicit AuditTable(const ModelSpec& spec);

  // Bytes of a table, at most.
  static int64_t BytesOf(const ModelSpec& spec) {
    return int64_t{spec.layer_count} * spec.kv_head_count * int64_t{sizeof(HeadAudit)};
  }

  // The heads' levels, [H_kv]; empty if all are 0, as they are at first.
  std::vector<int> Levels(int layer) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Records checks of attends that ran at `level`. If the head has another level by now, they only
  // count in its totals. Of n recent checks, the level is raised if more than delta * n +
  // sqrt(delta * (1 - delta) * n) + 0.5 failed, and lowered if n is large and at most delta / 2 * n
  // failed.
  void Record(int layer, int kv_head, int level, int level_max, double delta, int64_t check_count,
              int64_t violation_count) ABSL_LOCKS_EXCLUDED(mutex_);
  // Heads that were checked, those with the most violations first.
  std::vector<HeadAudit> Heads() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const int layer_count_;
  const int kv_head_count_;
  mutable Mutex mutex_;
  std::vector<HeadAudit> heads_ ABSL_GUARDED_BY(mutex_);  // [L][H_kv], empty at first
};

}  // namespace spillway

#pragma once

#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "host/base/mutex.h"
#include "host/model/model_spec.h"

namespace spillway {

// What checks have shown of one KV head of a layer, and how hard its attends
// try because of it. A check is of one query head and attend.
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

  // What a table takes at most.
  static int64_t BytesOf(const ModelSpec& spec) {
    return int64_t{spec.layer_count} * spec.kv_head_count * int64_t{sizeof(HeadAudit)};
  }

  // The heads' levels, [H_kv]; empty if all are 0, as they are at first.
  std::vector<int> Levels(int layer) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Checks of attends that were made at `level`; of another than the head's
  // own they are counted and change nothing. A head goes up a level when more
  // checks fail than a share delta of them explains, by a standard deviation
  // and a half check; down when after many at most half of that share did.
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

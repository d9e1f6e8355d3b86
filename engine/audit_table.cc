#include "engine/audit_table.h"

#include <algorithm>
#include <cmath>

namespace spillway {
namespace {

// Number of recent checks after which a head's level may be raised, and after which it may be
// lowered.
constexpr int64_t kRaiseCheckCount = 8;
constexpr int64_t kLowerCheckCount = 400;

}  // namespace

AuditTable::AuditTable(const ModelSpec& spec)
    : layer_count_(spec.layer_count), kv_head_count_(spec.kv_head_count) {}

std::vector<int> AuditTable::Levels(int layer) const {
  const MutexLock lock(mutex_);
  if (heads_.empty()) return {};
  const auto first = heads_.begin() + static_cast<ptrdiff_t>(layer) * kv_head_count_;
  const auto last = first + kv_head_count_;
  const auto raised = [](const HeadAudit& head) { return head.level > 0; };
  if (std::none_of(first, last, raised)) return {};
  std::vector<int> levels;
  for (auto head = first; head != last; ++head) levels.push_back(head->level);
  return levels;
}

void AuditTable::Record(int layer, int kv_head, int level, int level_max, double delta,
                        int64_t check_count, int64_t violation_count) {
  const MutexLock lock(mutex_);
  if (heads_.empty()) heads_.resize(static_cast<size_t>(layer_count_) * kv_head_count_);
  HeadAudit& head = heads_[static_cast<size_t>(layer) * kv_head_count_ + kv_head];
  head.layer = layer;
  head.kv_head = kv_head;
  head.check_count += check_count;
  head.violation_count += violation_count;
  if (level != head.level) return;
  head.recent_check_count += check_count;
  head.recent_violation_count += violation_count;
  const auto checks = static_cast<double>(head.recent_check_count);
  const auto violations = static_cast<double>(head.recent_violation_count);
  const double explained = delta * checks + std::sqrt(delta * (1 - delta) * checks) + 0.5;
  const bool many = head.recent_check_count >= kLowerCheckCount;
  if (head.recent_check_count >= kRaiseCheckCount && violations > explained) {
    head.level = std::min(head.level + 1, level_max);
  } else if (many && violations <= delta / 2 * checks) {
    head.level = std::max(head.level - 1, 0);
  } else if (!many) {
    return;
  }
  head.recent_check_count = head.recent_violation_count = 0;
}

std::vector<HeadAudit> AuditTable::Heads() const {
  std::vector<HeadAudit> checked;
  {
    const MutexLock lock(mutex_);
    std::copy_if(heads_.begin(), heads_.end(), std::back_inserter(checked),
                 [](const HeadAudit& head) { return head.check_count > 0; });
  }
  std::stable_sort(checked.begin(), checked.end(), [](const HeadAudit& a, const HeadAudit& b) {
    return a.violation_count > b.violation_count;
  });
  return checked;
}

}  // namespace spillway

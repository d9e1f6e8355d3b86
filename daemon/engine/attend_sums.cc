#include "daemon/engine/attend_sums.h"

#include <cmath>

namespace spillway {

void AttendSums::Add(const JobItem& item, int kv_head_count) {
  attend_count += item.attend->query_count;
  for (const int64_t count : item.result.touched_row_counts) touched_row_count += count;
  for (const int64_t count : item.attend->visible) visible_row_count += count * kv_head_count;
  moved_row_count += item.result.moved_row_count;
  for (const Certificate& certificate : item.result.certificates) {
    exact_count += certificate.promise == Promise::kExact;
    statistical_count += certificate.promise == Promise::kStatistical;
    none_count += certificate.promise == Promise::kNone;
    if (!std::isfinite(certificate.relative_error)) continue;
    ++certified_error_count;
    certified_error_sum += certificate.relative_error;
    if (certificate.promise == Promise::kExact) continue;
    ++certified_error_counts[ErrorDistribution::RangeOf(kErrorBounds, certificate.relative_error)];
  }
}

}  // namespace spillway

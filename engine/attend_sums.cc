#include "engine/attend_sums.h"

#include <algorithm>
#include <cmath>

namespace spillway {

void AttendSums::Add(const JobItem& item, int group_count) {
  attend_count += item.attend->query_count;
  for (const int64_t count : item.result.touched_row_counts) touched_row_count += count;
  for (const int64_t count : item.attend->visible) visible_row_count += count * group_count;
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

void AttendSums::Add(const AttendSums& other) {
  attend_count += other.attend_count;
  touched_row_count += other.touched_row_count;
  visible_row_count += other.visible_row_count;
  exact_count += other.exact_count;
  statistical_count += other.statistical_count;
  none_count += other.none_count;
  certified_error_count += other.certified_error_count;
  certified_error_sum += other.certified_error_sum;
  for (size_t i = 0; i < certified_error_counts.size(); ++i) {
    certified_error_counts[i] += other.certified_error_counts[i];
  }
  moved_row_count += other.moved_row_count;
}

double ItemTimeUs(const Job& job) {
  const auto own_count = static_cast<int64_t>(job.items.size());
  return job.device_time_us / static_cast<double>(std::max(own_count, job.batch_item_count));
}

}  // namespace spillway

#include "lib/step_sums.h"

#include <cmath>
#include <numeric>

namespace spillway {

spillway_sums SumsOf(const v1::AttendResponse& results, int64_t token_count) {
  spillway_sums sums = {};
  for (const v1::AttendResult& result : results.results()) {
    if (result.status().code() != 0) continue;
    const v1::Certificate& certificate = result.certificate();
    const auto& touched = result.statistics().touched_row_counts();
    const auto& visible = certificate.visible_token_counts();
    sums.attend_count += token_count;
    sums.touched_row_count += std::accumulate(touched.begin(), touched.end(), int64_t{0});
    // Every query head has a count of visible tokens; rows are counted once per KV head.
    if (!visible.empty()) {
      sums.visible_row_count += std::accumulate(visible.begin(), visible.end(), int64_t{0}) *
                                touched.size() / visible.size();
    }
    for (const int promise : certificate.promises()) {
      sums.exact_count += promise == v1::PROMISE_EXACT;
      sums.statistical_count += promise == v1::PROMISE_STATISTICAL;
      sums.none_count += promise == v1::PROMISE_NONE;
    }
    for (const float error : certificate.relative_errors()) {
      if (!std::isfinite(error)) continue;
      ++sums.certified_error_count;
      sums.certified_error_sum += error;
    }
    sums.device_time_us += result.statistics().device_time_us();
  }
  return sums;
}

}  // namespace spillway

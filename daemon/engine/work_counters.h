#pragma once

#include <atomic>
#include <cstdint>

namespace spillway {

// Work done; see WorkStatistics in the API for what each counts. Thread-safe,
// each counter by itself.
struct WorkCounters {
  std::atomic<int64_t> attend_count{0};
  std::atomic<int64_t> appended_row_count{0};
  std::atomic<int64_t> touched_row_count{0};
  std::atomic<int64_t> visible_row_count{0};
  std::atomic<double> attend_time_us{0};
  std::atomic<int64_t> exact_count{0};
  std::atomic<int64_t> statistical_count{0};
  std::atomic<int64_t> none_count{0};
};

}  // namespace spillway

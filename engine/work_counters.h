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

  void Add(const WorkCounters& other) {
    attend_count += other.attend_count;
    appended_row_count += other.appended_row_count;
    touched_row_count += other.touched_row_count;
    visible_row_count += other.visible_row_count;
    attend_time_us += other.attend_time_us;
    exact_count += other.exact_count;
    statistical_count += other.statistical_count;
    none_count += other.none_count;
  }
};

}  // namespace spillway

#pragma once

#include <cstdint>

#include "daemon/engine/engine_counters.h"
#include "host/device/device.h"

namespace spillway {

// What attends come to.
struct AttendSums {
  int64_t attend_count = 0;       // queries
  int64_t touched_row_count = 0;  // over KV heads
  int64_t visible_row_count = 0;  // the same
  int64_t exact_count = 0;        // certificates by promise, one a query head
  int64_t statistical_count = 0;
  int64_t none_count = 0;
  int64_t certified_error_count = 0;  // that are finite
  double certified_error_sum = 0;
  // Of those, by range, without the exact ones.
  ErrorDistribution::Counts certified_error_counts{};
  int64_t moved_row_count = 0;

  // Adds an item that was attended.
  void Add(const JobItem& item, int kv_head_count);
};

}  // namespace spillway

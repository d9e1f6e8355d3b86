#pragma once

#include <cstdint>

#include "engine/engine_counters.h"
#include "host/device/device.h"

namespace spillway {

// Sums over attends.
struct AttendSums {
  int64_t attend_count = 0;       // queries
  int64_t touched_row_count = 0;  // summed over groups
  int64_t visible_row_count = 0;  // the same
  int64_t exact_count = 0;        // certificates by promise, one per query and query head
  int64_t statistical_count = 0;
  int64_t none_count = 0;
  int64_t certified_error_count = 0;  // certificates with a finite error
  double certified_error_sum = 0;
  // The same by ranges of the error, without exact certificates.
  ErrorDistribution::Counts certified_error_counts{};
  int64_t moved_row_count = 0;

  // Adds an item that was attended.
  void Add(const JobItem& item, int group_count);
  void Add(const AttendSums& other);
};

// An item's part of the device's time for its job, in us.
double ItemTimeUs(const Job& job);

}  // namespace spillway

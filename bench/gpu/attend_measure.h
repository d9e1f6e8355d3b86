#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/gpu/gpu_fixture.h"

namespace spillway::bench {

// An attend whose output was compared with the rows that it names.
struct Checked {
  GpuFixture::Attended attended;
  std::vector<Selection> selections;  // [H_kv]
  double error = 0;                   // the largest relative one
};

// INTERNAL where the output is wrong. name: of the measurement, for messages.
absl::StatusOr<Checked> Check(GpuFixture& fixture, const std::string& name,
                              const AttendRequest& request);

// Medians over repetitions, caches flushed before each.
struct Timing {
  double us = 0;                  // of whole attends, timed without stages
  double us_mean = 0;             // likewise, their mean
  std::vector<StageTime> stages;  // in their order; measuring slows an attend
  int64_t row_count = 0;          // touched, of all KV heads
  int64_t moved_count = 0;        // of those, rows that came over the link
  std::vector<int64_t> touched;   // [H_kv], rows
  std::vector<int64_t> heavy;     // [H_kv]
  std::vector<int64_t> sampled;   // [H_kv]

  // The sum of the stages whose names count.
  double StageUs(const std::function<bool(const std::string&)>& counts) const;
};

// Attends to request_at(i) for each i < repetitions, then again with stages.
absl::StatusOr<Timing> Time(GpuFixture& fixture, int repetitions,
                            const std::function<AttendRequest(int)>& request_at);

}  // namespace spillway::bench

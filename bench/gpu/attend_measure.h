#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/gpu/gpu_fixture.h"

namespace spillway::bench {

// An attend whose output was compared with weighted attention over the rows that it selected.
struct Checked {
  GpuFixture::Attended attended;
  std::vector<Selection> selections;  // [H_kv]
  double error = 0;                   // the largest relative error of a query head
};

// INTERNAL if the output is wrong. name: the measurement, for error messages.
absl::StatusOr<Checked> Check(GpuFixture& fixture, const std::string& name,
                              const AttendRequest& request);

// Medians over repetitions. Caches are flushed before each.
struct Timing {
  double us = 0;                  // a whole attend, timed without its stages
  double us_mean = 0;             // the same, as a mean
  std::vector<StageTime> stages;  // in order; timing the stages makes attends slower
  int64_t row_count = 0;          // touched rows of all KV heads
  int64_t moved_count = 0;        // how many of them came over the link
  std::vector<int64_t> touched;   // [H_kv], touched rows
  std::vector<int64_t> heavy;     // [H_kv], heavy tokens
  std::vector<int64_t> sampled;   // [H_kv], sampled tokens

  // The total time of the stages for whose names `counts` is true.
  double StageUs(const std::function<bool(const std::string&)>& counts) const;
};

// Runs request_at(i) for each i < repetitions, and then all of them again with times of stages.
absl::StatusOr<Timing> Time(GpuFixture& fixture, int repetitions,
                            const std::function<AttendRequest(int)>& request_at);

}  // namespace spillway::bench

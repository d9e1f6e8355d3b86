#pragma once

#include <array>

namespace spillway {

// Stages of a job, in the order in which they run. Devices report the time of each.
enum class JobStage {
  kAppend,  // new rows are copied; pages that become full are indexed
  kDense,   // exact attention over all rows
  kScore,   // first stage of a sparse attend: tokens are scored from the index
  kCut,     // the heavy tokens are chosen, and the tail is cut into strata
  kSample,  // tokens of the tail are drawn, and it is estimated how many more to draw
  kFold,    // the chosen rows are read and summed up for the output
};
inline constexpr std::array<const char*, 6> kJobStageNames = {"append", "dense",  "score",
                                                              "cut",    "sample", "fold"};

}  // namespace spillway

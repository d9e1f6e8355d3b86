#pragma once

#include <array>

namespace spillway {

// Stages of a job that devices tell the time of, in the order that they run in.
enum class JobStage {
  kAppend,  // new rows are copied, and indexed where a page closes
  kDense,   // exact attention over all rows
  kScore,   // of a sparse attend: tokens are scored by what the index holds of them
  kCut,     // the heavy tokens are chosen, and the rest is cut into strata
  kSample,  // tokens of the rest are drawn, and it is estimated how many more to draw
  kFold,    // the chosen rows are read and summed up to the output
};
inline constexpr std::array<const char*, 6> kJobStageNames = {"append", "dense",  "score",
                                                              "cut",    "sample", "fold"};

}  // namespace spillway

#include "gpu/device/stage_times.h"

#include <algorithm>

namespace spillway::cuda {

void StageTimes::AddWave(const UnitResult& first, uint64_t ends, uint64_t append_begins) {
  // The stage that begins at each moment. A moment that was not reached took no time.
  static constexpr std::array<JobStage, kWaveMoments - 1> kBegun = {
      JobStage::kScore, JobStage::kCut,    JobStage::kSample,
      JobStage::kFold,  JobStage::kSample, JobStage::kFold};
  if (first.moments[kScoreBegins] == 0 || ends == 0) return;
  const uint64_t begins = append_begins != 0 ? append_begins : first.moments[kScoreBegins];
  first_ = first_ == 0 ? begins : std::min(first_, begins);
  last_ = std::max(last_, ends);
  JobStage stage = JobStage::kAppend;
  uint64_t since = append_begins;
  const auto until = [&](uint64_t moment) {
    if (since != 0 && moment > since) Add(stage, static_cast<double>(moment - since) / 1e3);
    since = moment;
  };
  for (int i = 0; i < kUnitEnds; ++i) {
    if (first.moments[i] == 0) continue;
    until(first.moments[i]);
    stage = kBegun[i];
  }
  until(ends);
}

std::vector<StageTime> StageTimes::Named() const {
  std::vector<StageTime> stages;
  for (size_t i = 0; i < us_.size(); ++i) {
    if (us_[i] > 0) stages.push_back({kJobStageNames[i], us_[i]});
  }
  return stages;
}

}  // namespace spillway::cuda

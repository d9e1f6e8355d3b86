#include "gpu/device/stage_times.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

namespace spillway::cuda {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

std::map<std::string, double> Microseconds(const StageTimes& times) {
  std::map<std::string, double> us;
  for (const StageTime& stage : times.Named()) us[stage.name] = stage.us;
  return us;
}

UnitResult Moments(const std::map<WaveMoment, uint64_t>& ns) {
  UnitResult result;
  for (const auto& [moment, at] : ns) result.moments[moment] = at;
  return result;
}

TEST(StageTimes, AStageLastsUntilTheNextBegins) {
  StageTimes times;
  times.AddWave(Moments({{kScoreBegins, 10'000},
                         {kCutBegins, 30'000},
                         {kPilotBegins, 34'000},
                         {kPilotFoldBegins, 39'000},
                         {kSampleBegins, 50'000},
                         {kSampleFoldBegins, 53'500},
                         {kUnitEnds, 60'000}}),
                61'000, 7'000);
  EXPECT_THAT(Microseconds(times),
              ElementsAre(Pair("append", 3), Pair("cut", 4), Pair("fold", 18.5),
                          Pair("sample", 8.5), Pair("score", 20)));
  EXPECT_EQ(times.waves_us(), 54);
  EXPECT_EQ(times.Named().front().name, "append");
  EXPECT_EQ(times.Named().back().name, "fold");
}

TEST(StageTimes, MomentsThatWereNotReachedTakeNoTime) {
  StageTimes times;
  times.AddWave(Moments({{kScoreBegins, 10'000},
                         {kCutBegins, 30'000},
                         {kPilotBegins, 34'000},
                         {kPilotFoldBegins, 39'000}}),
                50'000, 0);
  EXPECT_THAT(Microseconds(times),
              ElementsAre(Pair("cut", 4), Pair("fold", 11), Pair("sample", 5), Pair("score", 20)));
}

TEST(StageTimes, WavesAddUpAndMayRunBesideEachOther) {
  StageTimes times;
  times.Add(JobStage::kAppend, 2.5);
  times.AddWave(Moments({{kScoreBegins, 10'000}, {kCutBegins, 30'000}}), 35'000, 0);
  times.AddWave(Moments({{kScoreBegins, 20'000}, {kCutBegins, 32'000}}), 40'000, 0);
  EXPECT_THAT(Microseconds(times),
              ElementsAre(Pair("append", 2.5), Pair("cut", 13), Pair("score", 32)));
  EXPECT_EQ(times.waves_us(), 30);
}

TEST(StageTimes, AWaveThatDidNotRunTellsNothing) {
  StageTimes times;
  times.AddWave(Moments({}), 0, 5'000);
  times.AddWave(Moments({{kScoreBegins, 10'000}}), 0, 0);
  EXPECT_THAT(times.Named(), IsEmpty());
  EXPECT_EQ(times.waves_us(), 0);
}

}  // namespace
}  // namespace spillway::cuda

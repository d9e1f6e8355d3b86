#include "services/log/event_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "spdlog/sinks/ostream_sink.h"
#include "spdlog/spdlog.h"

namespace spillway {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::IsEmpty;

// Collects the lines "level message" that an EventLog writes.
class EventLogTest : public ::testing::Test {
 protected:
  EventLogTest() : before_(spdlog::default_logger()) {
    auto logger = std::make_shared<spdlog::logger>(
        "test", std::make_shared<spdlog::sinks::ostream_sink_mt>(out_));
    logger->set_pattern("%l %v");
    spdlog::set_default_logger(std::move(logger));
  }
  ~EventLogTest() override { spdlog::set_default_logger(before_); }

  // The lines written since the last call.
  std::vector<std::string> Lines() {
    std::istringstream in(out_.str());
    out_.str("");
    std::vector<std::string> lines;
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
  }

  EventLog events;

 private:
  std::ostringstream out_;
  const std::shared_ptr<spdlog::logger> before_;
};

TEST_F(EventLogTest, LevelsSayWhoseFaultItIs) {
  events.Refused(absl::InternalError("an attend on the GPU: out of order"), "INTERNAL");
  events.Refused(absl::ResourceExhaustedError("full"), "MEMORY_EXHAUSTED");
  events.Refused(absl::InvalidArgumentError("layer: 9"), "INVALID_FIELD");
  EXPECT_THAT(
      Lines(),
      ElementsAre(
          "error failed code=INTERNAL reason=INTERNAL error=\"an attend on the GPU: out of order\"",
          "warning refused code=RESOURCE_EXHAUSTED reason=MEMORY_EXHAUSTED error=full",
          "info refused code=INVALID_ARGUMENT reason=INVALID_FIELD error=\"layer: 9\""));
}

TEST_F(EventLogTest, ACallsTraceIsNamed) {
  events.Refused(absl::InvalidArgumentError("layer: 9"), "INVALID_FIELD", "0af7");
  events.Expired(
      {ExpiredSequence::Why::kIdle, "sequences/a", "models/m", 77, absl::Seconds(2), "0af8"});
  SlowAttends::Taken slow;
  slow.steps.attends.emplace_back().trace = "0af9";
  events.Slow(slow);
  EXPECT_THAT(Lines(), ElementsAre(EndsWith(" error=\"layer: 9\" trace=0af7"),
                                   EndsWith(" idle_seconds=2.0 trace=0af8"),
                                   EndsWith(" device_ms=0.000 trace=0af9")));
}

TEST_F(EventLogTest, WhatTheClientGaveUpIsNoNews) {
  events.Refused(absl::CancelledError("gone"), "CANCELLED");
  events.Refused(absl::UnavailableError("the daemon is shutting down"), "UNAVAILABLE");
  EXPECT_THAT(Lines(), IsEmpty());
}

TEST_F(EventLogTest, CountsWhatItLeavesOutByKind) {
  for (int i = 0; i < 12; ++i) events.Refused(absl::InternalError("broken"), "INTERNAL");
  events.Refused(absl::NotFoundError("none"), "MODEL_NOT_FOUND");
  EXPECT_EQ(Lines().size(), 6u);
  events.Flush();
  EXPECT_THAT(Lines(), ElementsAre("error suppressed kind=\"failed INTERNAL\" lines=7"));
  events.Flush();
  EXPECT_THAT(Lines(), IsEmpty());
  events.Refused(absl::InternalError("broken"), "INTERNAL");
  EXPECT_EQ(Lines().size(), 1u);
}

TEST_F(EventLogTest, AnExpiredSequenceSaysWhy) {
  using Why = ExpiredSequence::Why;
  events.Expired({Why::kIdle, "sequences/a", "models/m", 77, absl::Milliseconds(2340)});
  EXPECT_THAT(Lines(),
              ElementsAre("info expired sequence=sequences/a why=\"nobody used it for its ttl\" "
                          "model=models/m tokens=77 idle_seconds=2.3"));
  for (int i = 0; i < 8; ++i) {
    events.Expired({Why::kAbandoned, "sequences/b", "models/m", 5, absl::Seconds(60)});
  }
  EXPECT_THAT(Lines(), Each("info expired sequence=sequences/b why=\"its client is gone\" "
                            "model=models/m tokens=5 idle_seconds=60.0"));
  events.Flush();
  EXPECT_THAT(Lines(), ElementsAre("info suppressed kind=\"expired its client is gone\" lines=3"));
}

TEST_F(EventLogTest, ASlowAttendSaysWhereItsTimeWent) {
  const SlowAttend attend{.sequence = "sequences/a",
                          .sequence_count = 2,
                          .model = "models/m",
                          .layer = 7,
                          .token_count = 4096,
                          .query_count = 1,
                          .seconds = 1.26,
                          .wait_seconds = 1.2,
                          .queue_seconds = 0.05,
                          .device_seconds = 0.0021,
                          .stages = {{"score", 1300}, {"fold", 800, "cuda:1"}},
                          .trace = ""};
  SlowAttends::Taken taken;
  taken.steps = {{attend}, 0};
  taken.others = {std::vector<SlowAttend>(SlowAttends::Some::kCountMax, attend), 3};
  events.Slow(taken);
  const std::string said =
      "sequence=sequences/a sequences=2 model=models/m layer=7 tokens=4096 queries=1 ms=1260.000 "
      "wait_ms=1200.000 queue_ms=50.000 device_ms=2.100 score_ms=1.300 cuda:1_fold_ms=0.800";
  const std::vector<std::string> lines = Lines();
  ASSERT_EQ(lines.size(), 6);
  EXPECT_EQ(lines[0], "warning slow_step " + said);
  EXPECT_THAT(std::vector(lines.begin() + 1, lines.end()), Each("info slow_attend " + said));
  events.Flush();
  EXPECT_THAT(Lines(), ElementsAre("info suppressed kind=slow_attend lines=3"));
}

TEST_F(EventLogTest, LibrariesAreNamedAndRareEnough) {
  for (int i = 0; i < 7; ++i) {
    events.Library(LogLevel::kWarning, "protobuf", "google/protobuf/wire_format.cc", 618,
                   "no UTF-8");
  }
  events.Library(LogLevel::kError, "protobuf", "text.cc", 1, "the last words");
  EXPECT_THAT(
      Lines(),
      ElementsAre("warning library library=protobuf message=\"no UTF-8\" source=wire_format.cc:618",
                  "warning library library=protobuf message=\"no UTF-8\" source=wire_format.cc:618",
                  "warning library library=protobuf message=\"no UTF-8\" source=wire_format.cc:618",
                  "warning library library=protobuf message=\"no UTF-8\" source=wire_format.cc:618",
                  "warning library library=protobuf message=\"no UTF-8\" source=wire_format.cc:618",
                  "error library library=protobuf message=\"the last words\" source=text.cc:1"));
  events.Flush();
  EXPECT_THAT(Lines(), ElementsAre("warning suppressed kind=\"library protobuf\" lines=2"));
}

}  // namespace
}  // namespace spillway

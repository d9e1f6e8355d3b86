#include "daemon/server/frame_counter.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <string_view>

namespace spillway {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

enum Type { kData, kHeaders, kPriority, kReset, kSettings, kPush, kPing, kGoAway, kWindow, kMore };
constexpr int kEndStream = 1;
constexpr int kAck = 1;

std::string Frame(Type type, int flags, uint32_t stream, size_t length = 0) {
  std::string frame = {static_cast<char>(length >> 16), static_cast<char>(length >> 8),
                       static_cast<char>(length),       static_cast<char>(type),
                       static_cast<char>(flags),        static_cast<char>(stream >> 24),
                       static_cast<char>(stream >> 16), static_cast<char>(stream >> 8),
                       static_cast<char>(stream)};
  // Bytes that would look like a frame of an unknown type, if they were taken for one.
  frame.append(length, '\x7f');
  return frame;
}

std::string Repeat(const std::string& frame, int count) {
  std::string frames;
  for (int i = 0; i < count; ++i) frames += frame;
  return frames;
}

// HEADERS of `count` new streams.
std::string Opened(int count, uint32_t first = 1) {
  std::string frames;
  for (int i = 0; i < count; ++i) frames += Frame(kHeaders, 4, first + 2 * i, 20);
  return frames;
}

class FrameCounterTest : public ::testing::Test {
 protected:
  static constexpr int kStreams = 10;

  // Whether the frames are fine.
  bool Take(std::string_view bytes) { return counter_.Take(bytes, now_) == nullptr; }
  bool acknowledged() const { return counter_.acknowledged(); }

  FrameCounter counter_{kStreams};
  FrameCounter::Clock::time_point now_ = FrameCounter::Clock::now();
  const std::string greeting_ = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + Frame(kSettings, 0, 0, 12);
};

TEST_F(FrameCounterTest, LimitsStreamsUntilTheSettingsAreAcknowledged) {
  ASSERT_TRUE(Take(greeting_ + Opened(kStreams)));
  FrameCounter silent = counter_;
  EXPECT_NE(silent.Take(Opened(1, 101), now_), nullptr);
  // Trailers open no stream.
  ASSERT_TRUE(Take(Frame(kHeaders, 5, 1, 20)));
  EXPECT_FALSE(acknowledged());
  ASSERT_TRUE(Take(Frame(kSettings, kAck, 0)));
  EXPECT_TRUE(acknowledged());
  EXPECT_TRUE(Take(Opened(1000, 101)));
}

TEST_F(FrameCounterTest, FindsTheSameFramesWhereverTheBytesAreSplit) {
  const std::string fine = greeting_ + Frame(kData, 0, 1, 300) + Opened(kStreams);
  const std::string bad = fine + Opened(1, 101);
  for (size_t split = 0; split <= fine.size(); ++split) {
    FrameCounter counter(kStreams);
    ASSERT_EQ(counter.Take(std::string_view(bad).substr(0, split), now_), nullptr) << split;
    ASSERT_NE(counter.Take(std::string_view(bad).substr(split), now_), nullptr) << split;
  }
  FrameCounter counter(kStreams);
  for (const char byte : fine) ASSERT_EQ(counter.Take({&byte, 1}, now_), nullptr);
}

TEST_F(FrameCounterTest, LimitsTheHeadersOfACall) {
  ASSERT_TRUE(Take(greeting_));
  const size_t half = FrameCounter::kHeaderBlockBytesMax / 2;
  ASSERT_TRUE(Take(Frame(kHeaders, 0, 1, half) + Frame(kMore, 4, 1, half)));
  ASSERT_TRUE(Take(Frame(kHeaders, 0, 3, half) + Frame(kMore, 4, 3, half)));
  EXPECT_FALSE(
      Take(Frame(kHeaders, 0, 5, half) + Frame(kMore, 0, 5, half) + Frame(kMore, 4, 5, 1)));
}

TEST_F(FrameCounterTest, LimitsTheFramesOfHeaders) {
  const int most = FrameCounter::kContinuationCountMax;
  ASSERT_TRUE(Take(greeting_));
  ASSERT_TRUE(Take(Frame(kHeaders, 0, 1, 1) + Repeat(Frame(kMore, 0, 1), most)));
  ASSERT_TRUE(Take(Frame(kHeaders, 0, 3, 1) + Repeat(Frame(kMore, 0, 3), most)));
  EXPECT_FALSE(Take(Frame(kMore, 0, 3)));
}

TEST_F(FrameCounterTest, LimitsResetsByTheirRate) {
  const auto burst = static_cast<int>(FrameCounter::kResetBurst);
  ASSERT_TRUE(Take(greeting_ + Repeat(Frame(kReset, 0, 1, 4), burst)));
  now_ += seconds(1);
  const auto more = static_cast<int>(FrameCounter::kResetRate);
  ASSERT_TRUE(Take(Repeat(Frame(kReset, 0, 1, 4), more)));
  EXPECT_FALSE(Take(Frame(kReset, 0, 1, 4)));
}

TEST_F(FrameCounterTest, LimitsFramesThatCarryNoCall) {
  const auto burst = static_cast<int>(FrameCounter::kControlBurst);
  for (const std::string& frame :
       {Frame(kSettings, 0, 0, 6), Frame(kSettings, kAck, 0), Frame(kPing, 0, 0, 8),
        Frame(kPing, kAck, 0, 8), Frame(kPriority, 0, 1, 5), Frame(kData, 0, 1),
        Frame(kPush, 0, 1, 8), Frame(kGoAway, 0, 0, 8), Frame(static_cast<Type>(77), 0, 0, 1)}) {
    FrameCounter counter(kStreams);
    ASSERT_EQ(counter.Take(greeting_, now_), nullptr);
    ASSERT_EQ(counter.Take(Repeat(frame, burst - 1), now_), nullptr) << int{frame[3]};
    ASSERT_NE(counter.Take(frame, now_), nullptr) << int{frame[3]};
    ASSERT_EQ(counter.Take(frame, now_ + milliseconds(100)), nullptr) << int{frame[3]};
  }
}

TEST_F(FrameCounterTest, AllowsAnyNumberOfCallsAndMessages) {
  ASSERT_TRUE(Take(greeting_ + Frame(kSettings, kAck, 0)));
  for (int i = 0; i < 20000; ++i) {
    const uint32_t stream = 1 + 2 * i;
    ASSERT_TRUE(Take(Frame(kHeaders, 4, stream, 20) + Frame(kData, 0, stream, 50) +
                     Frame(kWindow, 0, 0, 4) + Frame(kWindow, 0, stream, 4) +
                     Frame(kData, kEndStream, stream)));
  }
}

}  // namespace
}  // namespace spillway

#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace spillway {

// Allows `burst` events at once, and `rate` events per second after that. Not thread-safe.
class TokenBucket {
 public:
  using Clock = std::chrono::steady_clock;

  constexpr TokenBucket(double burst, double rate) : burst_(burst), rate_(rate), left_(burst) {}
  // Whether one more event is allowed.
  bool Take(Clock::time_point now);

 private:
  double burst_;
  double rate_;  // per second
  double left_;
  Clock::time_point last_{};
};

// Follows the frames of one HTTP/2 connection (RFC 9113) as its client sends them, and says when
// the client sends more of a kind than a gRPC client needs. Only the heads of frames are looked at,
// so large messages cost nothing. Not thread-safe.
class FrameCounter {
 public:
  using Clock = TokenBucket::Clock;

  static constexpr size_t kHeaderBlockBytesMax = 64 << 10;
  static constexpr int kContinuationCountMax = 32;  // frames of one header block after the first
  static constexpr double kResetBurst = 2000;
  static constexpr double kResetRate = 1000;  // per second
  // Frames that make the server answer or remember something, but carry nothing of a call.
  static constexpr double kControlBurst = 1000;
  static constexpr double kControlRate = 100;  // per second

  // early_stream_count_max: most streams that the client opens before it acknowledges the server's
  // SETTINGS. Until then gRPC enforces no limit on streams of its own.
  explicit FrameCounter(int early_stream_count_max)
      : early_stream_count_max_(early_stream_count_max) {}

  // Counts the bytes that follow on those of the last call. Returns why the connection must be
  // ended, for people; null if it is fine.
  const char* Take(std::string_view bytes, Clock::time_point now);

  // Streams that the client has opened.
  int64_t stream_count() const { return stream_count_; }
  // Whether the client has acknowledged the server's SETTINGS.
  bool acknowledged() const { return acknowledged_; }

 private:
  const char* Begin(Clock::time_point now);  // a frame whose head is complete

  int early_stream_count_max_;
  // Bytes to skip: at first the client's preface, then the payload of a frame.
  size_t skip_bytes_ = 24;
  std::array<uint8_t, 9> head_{};
  size_t head_bytes_ = 0;

  bool acknowledged_ = false;
  int64_t stream_count_ = 0;
  uint32_t last_stream_ = 0;
  size_t block_bytes_ = 0;
  int continuation_count_ = 0;
  TokenBucket resets_{kResetBurst, kResetRate};
  TokenBucket controls_{kControlBurst, kControlRate};
};

}  // namespace spillway

#include "daemon/server/frame_counter.h"

#include <algorithm>

namespace spillway {
namespace {

// RFC 9113, section 6.
enum FrameType : uint8_t {
  kData = 0,
  kHeaders = 1,
  kPriority = 2,
  kResetStream = 3,
  kSettings = 4,
  kWindowUpdate = 8,
  kContinuation = 9,
};
constexpr uint8_t kAck = 1;
constexpr uint8_t kEndStream = 1;

}  // namespace

bool TokenBucket::Take(Clock::time_point now) {
  const double seconds = std::chrono::duration<double>(now - last_).count();
  left_ = std::min(burst_, left_ + seconds * rate_);
  last_ = now;
  if (left_ < 1) return false;
  --left_;
  return true;
}

const char* FrameCounter::Take(std::string_view bytes, Clock::time_point now) {
  while (!bytes.empty()) {
    if (skip_bytes_ > 0) {
      const size_t skipped = std::min(skip_bytes_, bytes.size());
      skip_bytes_ -= skipped;
      bytes.remove_prefix(skipped);
      continue;
    }
    const size_t taken = std::min(head_.size() - head_bytes_, bytes.size());
    std::copy_n(bytes.begin(), taken, head_.begin() + head_bytes_);
    head_bytes_ += taken;
    bytes.remove_prefix(taken);
    if (head_bytes_ < head_.size()) break;
    head_bytes_ = 0;
    if (const char* why = Begin(now); why != nullptr) return why;
  }
  return nullptr;
}

const char* FrameCounter::Begin(Clock::time_point now) {
  const size_t length = size_t{head_[0]} << 16 | size_t{head_[1]} << 8 | head_[2];
  const uint8_t type = head_[3];
  const uint8_t flags = head_[4];
  const uint32_t stream =
      (uint32_t{head_[5]} << 24 | uint32_t{head_[6]} << 16 | uint32_t{head_[7]} << 8 | head_[8]) &
      0x7fffffff;
  skip_bytes_ = length;
  switch (type) {
    case kHeaders:
      block_bytes_ = length;
      continuation_count_ = 0;
      if (stream > last_stream_) {
        last_stream_ = stream;
        if (++stream_count_ > early_stream_count_max_ && !acknowledged_) {
          return "it opened too many streams before it acknowledged the server's SETTINGS";
        }
      }
      break;
    case kContinuation:
      block_bytes_ += length;
      if (++continuation_count_ > kContinuationCountMax) {
        return "the headers of a call have too many frames";
      }
      break;
    case kResetStream:
      return resets_.Take(now) ? nullptr : "it reset streams too often";
    case kData:
      if (length > 0 || (flags & kEndStream) != 0) return nullptr;
      return controls_.Take(now) ? nullptr : "it sent too many empty DATA frames";
    case kWindowUpdate:
      return nullptr;
    case kSettings:
      if ((flags & kAck) != 0) acknowledged_ = true;
      [[fallthrough]];
    default:
      return controls_.Take(now) ? nullptr : "it sent too many frames that carry no call";
  }
  return block_bytes_ > kHeaderBlockBytesMax ? "the headers of a call are too large" : nullptr;
}

}  // namespace spillway

#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <string>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/base/mutex.h"

namespace spillway {

class MemoryReservation;

// What memory is used for.
enum class MemoryUse { kPages, kModels, kTables, kWorkspaces, kMessages, kOther };
inline constexpr int kMemoryUseCount = 6;
// Name for people to read: "rows and codes", "messages", ...
std::string_view MemoryUseName(MemoryUse use);

// The limit on all memory that the daemon holds: arena extents, model weights, tables, workspaces,
// messages in flight. Messages have a share of their own, which nothing else can use, and which
// they cannot exceed. So a daemon that is full of K/V still receives the calls that free memory,
// and messages cannot displace K/V. Thread-safe.
class MemoryBudget {
 public:
  // Gives back at least `bytes` of the memory that its owner has charged, if possible.
  using Reclaim = std::function<void(int64_t bytes)>;

  // setting: what sets the limit, for error messages: "--memory-limit".
  explicit MemoryBudget(int64_t limit_bytes, int64_t message_bytes = 0, std::string setting = "")
      : limit_bytes_(limit_bytes), message_bytes_(message_bytes), setting_(std::move(setting)) {}
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  // The share of a limit that a daemon keeps for messages.
  static int64_t MessageShare(int64_t limit_bytes);

  // Charges bytes for the lifetime of the reservation. If they do not fit, calls the reclaim
  // functions, but not for pages: the owners of these functions hold pages. If they still do not
  // fit, charges nothing: RESOURCE_EXHAUSTED, naming `what`, the bytes needed and the bytes free.
  absl::StatusOr<MemoryReservation> Reserve(int64_t bytes, std::string_view what,
                                            MemoryUse use = MemoryUse::kOther);

  // MemoryExhausted() that also names the limit and its setting.
  absl::Status Exhausted(std::string_view what, int64_t needed_bytes, int64_t free_bytes,
                         MemoryUse use = MemoryUse::kOther) const;

  // Reserve() calls `reclaim` from now on, until RemoveReclaim() gets the returned iterator.
  // reclaim must not reserve anything but pages.
  std::list<Reclaim>::iterator AddReclaim(Reclaim reclaim) ABSL_LOCKS_EXCLUDED(mutex_);
  void RemoveReclaim(std::list<Reclaim>::iterator reclaim) ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t limit_bytes() const { return limit_bytes_; }
  const std::string& setting() const { return setting_; }
  // The part of the limit that only messages can use.
  int64_t message_bytes() const { return message_bytes_; }
  int64_t used_bytes() const;
  int64_t used_bytes(MemoryUse use) const {
    return used_bytes_[static_cast<int>(use)].load(std::memory_order_relaxed);
  }
  // Free for everything except messages.
  int64_t free_bytes() const { return FreeBytes(MemoryUse::kOther); }

 private:
  friend class MemoryReservation;
  int64_t FreeBytes(MemoryUse use) const;
  // Charges the bytes if they fit. Returns whether they did.
  bool TryCharge(int64_t bytes, MemoryUse use);
  void Release(int64_t bytes, MemoryUse use);

  const int64_t limit_bytes_;
  const int64_t message_bytes_;
  const std::string setting_;
  std::atomic<int64_t> contents_bytes_{0};  // everything except messages
  std::array<std::atomic<int64_t>, kMemoryUseCount> used_bytes_{};
  Mutex mutex_;
  std::list<Reclaim> reclaims_ ABSL_GUARDED_BY(mutex_);
};

// RESOURCE_EXHAUSTED for `what`, with a payload (kNeededFreePayload, "needed free") that the daemon
// converts to ErrorInfo metadata.
absl::Status MemoryExhausted(std::string_view what, int64_t needed_bytes, int64_t free_bytes);
inline constexpr std::string_view kNeededFreePayload = "spillway/needed_free_bytes";
// The limit and its setting, "limit setting", if the status was made by MemoryBudget::Exhausted().
inline constexpr std::string_view kMemoryLimitPayload = "spillway/memory_limit";

// Owner of charged bytes. Movable, not thread-safe.
class MemoryReservation {
 public:
  MemoryReservation() = default;
  MemoryReservation(MemoryReservation&& o) noexcept
      : budget_(std::exchange(o.budget_, nullptr)),
        bytes_(std::exchange(o.bytes_, 0)),
        use_(o.use_) {}
  // Splits off a part as a reservation of its own. REQUIRES: bytes <= bytes().
  MemoryReservation Split(int64_t bytes) {
    bytes_ -= bytes;
    return MemoryReservation(budget_, bytes, use_);
  }
  // Takes over the charge of `o`. REQUIRES: both have the same budget and use, or one is empty.
  void Absorb(MemoryReservation&& o) {
    if (budget_ == nullptr) {
      *this = std::move(o);
      return;
    }
    bytes_ += std::exchange(o.bytes_, 0);
    o.budget_ = nullptr;
  }
  MemoryReservation& operator=(MemoryReservation&& o) noexcept {
    if (this != &o) {
      Release();
      budget_ = std::exchange(o.budget_, nullptr);
      bytes_ = std::exchange(o.bytes_, 0);
      use_ = o.use_;
    }
    return *this;
  }
  ~MemoryReservation() { Release(); }
  void Release() {
    if (budget_ != nullptr) budget_->Release(bytes_, use_);
    budget_ = nullptr;
    bytes_ = 0;
  }
  int64_t bytes() const { return bytes_; }

 private:
  friend class MemoryBudget;
  MemoryReservation(MemoryBudget* budget, int64_t bytes, MemoryUse use)
      : budget_(budget), bytes_(bytes), use_(use) {}
  MemoryBudget* budget_ = nullptr;
  int64_t bytes_ = 0;
  MemoryUse use_ = MemoryUse::kOther;
};

}  // namespace spillway

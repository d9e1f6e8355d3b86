#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spillway {

class MemoryReservation;

// The limit on everything that the daemon holds: arena chunks, model weights,
// tables, workspaces, messages in flight. Thread-safe.
class MemoryBudget {
 public:
  explicit MemoryBudget(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  // Charges bytes until the reservation goes. RESOURCE_EXHAUSTED, naming
  // `what`, the bytes needed and the bytes free, when they do not fit; then
  // nothing is charged.
  absl::StatusOr<MemoryReservation> Reserve(int64_t bytes, std::string_view what);

  int64_t limit_bytes() const { return limit_bytes_; }
  int64_t used_bytes() const { return used_bytes_.load(std::memory_order_relaxed); }
  int64_t free_bytes() const { return limit_bytes_ - used_bytes(); }

 private:
  friend class MemoryReservation;
  const int64_t limit_bytes_;
  std::atomic<int64_t> used_bytes_{0};
};

// RESOURCE_EXHAUSTED for `what` with a payload (kNeededFreePayload,
// "needed free") that the daemon turns into ErrorInfo metadata.
absl::Status MemoryExhausted(std::string_view what, int64_t needed_bytes, int64_t free_bytes);
inline constexpr std::string_view kNeededFreePayload = "spillway/needed_free_bytes";

// Owner of charged bytes. Movable, not thread-safe.
class MemoryReservation {
 public:
  MemoryReservation() = default;
  MemoryReservation(MemoryReservation&& o) noexcept
      : budget_(std::exchange(o.budget_, nullptr)), bytes_(std::exchange(o.bytes_, 0)) {}
  MemoryReservation& operator=(MemoryReservation&& o) noexcept {
    if (this != &o) {
      Release();
      budget_ = std::exchange(o.budget_, nullptr);
      bytes_ = std::exchange(o.bytes_, 0);
    }
    return *this;
  }
  ~MemoryReservation() { Release(); }
  void Release() {
    if (budget_ != nullptr) budget_->used_bytes_.fetch_sub(bytes_, std::memory_order_relaxed);
    budget_ = nullptr;
    bytes_ = 0;
  }
  int64_t bytes() const { return bytes_; }

 private:
  friend class MemoryBudget;
  MemoryReservation(MemoryBudget* budget, int64_t bytes) : budget_(budget), bytes_(bytes) {}
  MemoryBudget* budget_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace spillway

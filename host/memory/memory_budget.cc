#include "host/memory/memory_budget.h"

#include <algorithm>
#include <cassert>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace spillway {
namespace {

// Messages get an eighth of the limit, which a daemon with many connections uses, but at most what
// hundreds of the largest messages take, and at least one of the largest and its answer.
constexpr int64_t kMessageShare = 8;
constexpr int64_t kMessageBytesMost = int64_t{1} << 30;
constexpr int64_t kMessageBytesLeast = int64_t{16} << 20;

// Adds to `used` unless that would pass `limit`.
bool AddWithin(std::atomic<int64_t>& used, int64_t bytes, int64_t limit) {
  int64_t now = used.load(std::memory_order_relaxed);
  do {
    // Subtraction, because now + bytes could overflow.
    if (bytes > limit - now) return false;
  } while (!used.compare_exchange_weak(now, now + bytes, std::memory_order_relaxed));
  return true;
}

void SetPayload(std::string_view url, const std::string& value, absl::Status& status) {
  status.SetPayload(absl::string_view(url.data(), url.size()), absl::Cord(value));
}

absl::Status Refusal(std::string_view what, int64_t needed_bytes, int64_t free_bytes,
                     const std::string& of) {
  absl::Status status = absl::ResourceExhaustedError(
      absl::StrCat(std::string(what), " needs ", needed_bytes, " bytes of memory and ", free_bytes,
                   " bytes are free", of));
  SetPayload(kNeededFreePayload, absl::StrCat(needed_bytes, " ", free_bytes), status);
  return status;
}

}  // namespace

std::string_view MemoryUseName(MemoryUse use) {
  switch (use) {
    case MemoryUse::kPages:
      return "rows and codes";
    case MemoryUse::kModels:
      return "models";
    case MemoryUse::kTables:
      return "page tables";
    case MemoryUse::kWorkspaces:
      return "workspaces";
    case MemoryUse::kMessages:
      return "messages";
    case MemoryUse::kOther:
      return "other";
  }
  return "unknown";
}

absl::Status MemoryExhausted(std::string_view what, int64_t needed_bytes, int64_t free_bytes) {
  return Refusal(what, needed_bytes, free_bytes, "");
}

absl::Status MemoryBudget::Exhausted(std::string_view what, int64_t needed_bytes,
                                     int64_t free_bytes, MemoryUse use) const {
  std::string of = absl::StrCat(" of the limit of ", limit_bytes_, " bytes");
  if (!setting_.empty()) absl::StrAppend(&of, ", which ", setting_, " sets");
  if (use == MemoryUse::kMessages) {
    of = absl::StrCat(" of the ", message_bytes_, " that messages have", of);
  }
  absl::Status status = Refusal(what, needed_bytes, free_bytes, of);
  SetPayload(kMemoryLimitPayload, absl::StrCat(limit_bytes_, " ", setting_), status);
  return status;
}

int64_t MemoryBudget::MessageShare(int64_t limit_bytes) {
  return std::min(std::clamp(limit_bytes / kMessageShare, kMessageBytesLeast, kMessageBytesMost),
                  limit_bytes / 2);
}

int64_t MemoryBudget::used_bytes() const {
  return contents_bytes_.load(std::memory_order_relaxed) + used_bytes(MemoryUse::kMessages);
}

int64_t MemoryBudget::FreeBytes(MemoryUse use) const {
  return use == MemoryUse::kMessages
             ? message_bytes_ - used_bytes(use)
             : limit_bytes_ - message_bytes_ - contents_bytes_.load(std::memory_order_relaxed);
}

bool MemoryBudget::TryCharge(int64_t bytes, MemoryUse use) {
  std::atomic<int64_t>& used = used_bytes_[static_cast<int>(use)];
  if (use == MemoryUse::kMessages) return AddWithin(used, bytes, message_bytes_);
  if (!AddWithin(contents_bytes_, bytes, limit_bytes_ - message_bytes_)) return false;
  used.fetch_add(bytes, std::memory_order_relaxed);
  return true;
}

void MemoryBudget::Release(int64_t bytes, MemoryUse use) {
  used_bytes_[static_cast<int>(use)].fetch_sub(bytes, std::memory_order_relaxed);
  if (use != MemoryUse::kMessages) contents_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
}

absl::StatusOr<MemoryReservation> MemoryBudget::Reserve(int64_t bytes, std::string_view what,
                                                        MemoryUse use) {
  assert(bytes >= 0);
  if (TryCharge(bytes, use)) return MemoryReservation(this, bytes, use);
  if (use != MemoryUse::kMessages && use != MemoryUse::kPages &&
      bytes <= limit_bytes_ - message_bytes_) {
    const MutexLock lock(mutex_);
    for (const Reclaim& reclaim : reclaims_) {
      const int64_t missing = bytes - FreeBytes(use);
      if (missing > 0) reclaim(missing);
    }
    if (TryCharge(bytes, use)) return MemoryReservation(this, bytes, use);
  }
  return Exhausted(what, bytes, FreeBytes(use), use);
}

std::list<MemoryBudget::Reclaim>::iterator MemoryBudget::AddReclaim(Reclaim reclaim) {
  const MutexLock lock(mutex_);
  return reclaims_.insert(reclaims_.end(), std::move(reclaim));
}

void MemoryBudget::RemoveReclaim(std::list<Reclaim>::iterator reclaim) {
  const MutexLock lock(mutex_);
  reclaims_.erase(reclaim);
}

}  // namespace spillway

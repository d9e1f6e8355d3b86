#include "host/memory/memory_budget.h"

#include <cassert>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace spillway {

absl::Status MemoryExhausted(std::string_view what, int64_t needed_bytes, int64_t free_bytes) {
  absl::Status status = absl::ResourceExhaustedError(
      absl::StrCat(std::string(what), " needs ", needed_bytes, " bytes of memory and ", free_bytes,
                   " bytes are free"));
  status.SetPayload(absl::string_view(kNeededFreePayload.data(), kNeededFreePayload.size()),
                    absl::Cord(absl::StrCat(needed_bytes, " ", free_bytes)));
  return status;
}

absl::StatusOr<MemoryReservation> MemoryBudget::Reserve(int64_t bytes, std::string_view what) {
  assert(bytes >= 0);
  int64_t used = used_bytes_.load(std::memory_order_relaxed);
  do {
    // Compared by subtraction: used + bytes could overflow.
    if (bytes > limit_bytes_ - used) return MemoryExhausted(what, bytes, limit_bytes_ - used);
  } while (!used_bytes_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  return MemoryReservation(this, bytes);
}

}  // namespace spillway

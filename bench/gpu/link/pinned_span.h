#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "absl/status/statusor.h"
#include "bench/gpu/link/plan.h"
#include "host/memory/memory_budget.h"

namespace spillway::bench {

// What obtaining and pinning host memory took, once.
struct PinningCost {
  double seconds = 0;  // in all: until the GPU may use the memory
  // Of those, in cudaHostRegister; nothing where one call does everything.
  std::optional<double> register_seconds;
};

// Owner of host memory that the GPU reads and writes in place, at the host's
// addresses. Registered in chunks of kSpanStepBytes, so no single copy may
// cross a multiple of that.
class PinnedSpan {
 public:
  // `touch_thread_count` threads touch the pages first, where that is the
  // benchmark's own doing. RESOURCE_EXHAUSTED from budget, system or driver;
  // FAILED_PRECONDITION when the system refuses to bind to the NUMA node.
  // REQUIRES: bytes is a multiple of kSpanStepBytes.
  static absl::StatusOr<std::unique_ptr<PinnedSpan>> Create(const Allocation& allocation,
                                                            int touch_thread_count,
                                                            MemoryBudget* budget);
  virtual ~PinnedSpan() = default;
  PinnedSpan(const PinnedSpan&) = delete;
  PinnedSpan& operator=(const PinnedSpan&) = delete;

  // All of it; aligned to 4096 bytes.
  virtual std::span<std::byte> memory() const = 0;
  // Of it, what transparent huge pages hold.
  virtual int64_t huge_page_bytes() const { return 0; }
  const PinningCost& cost() const { return cost_; }

 protected:
  PinnedSpan() = default;

 private:
  PinningCost cost_;
};

}  // namespace spillway::bench

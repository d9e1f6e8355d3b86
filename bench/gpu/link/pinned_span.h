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

// The time to allocate and pin the host memory, measured once.
struct PinningCost {
  double seconds = 0;  // total, until the GPU can use the memory
  // The part of it in cudaHostRegister; nothing if one call does everything.
  std::optional<double> register_seconds;
};

// Owns host memory that the GPU reads and writes in place, at the host's addresses. It is
// registered in chunks of kSpanStepBytes, so no copy may cross a multiple of kSpanStepBytes.
class PinnedSpan {
 public:
  // touch_thread_count: how many threads touch the pages first, if the benchmark and not the driver
  // does this. RESOURCE_EXHAUSTED from the budget, system or driver; FAILED_PRECONDITION if the
  // system refuses to bind memory to the NUMA node.
  // REQUIRES: bytes is a positive multiple of kSpanStepBytes.
  static absl::StatusOr<std::unique_ptr<PinnedSpan>> Create(const Allocation& allocation,
                                                            int touch_thread_count,
                                                            MemoryBudget* budget);
  virtual ~PinnedSpan() = default;
  PinnedSpan(const PinnedSpan&) = delete;
  PinnedSpan& operator=(const PinnedSpan&) = delete;

  // The whole memory; aligned to 4096 bytes.
  virtual std::span<std::byte> memory() const = 0;
  // How many of its bytes are in transparent huge pages.
  virtual int64_t huge_page_bytes() const { return 0; }
  const PinningCost& cost() const { return cost_; }

 protected:
  PinnedSpan() = default;

 private:
  PinningCost cost_;
};

}  // namespace spillway::bench

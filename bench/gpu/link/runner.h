#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/gpu/link/plan.h"
#include "host/memory/memory_budget.h"

namespace spillway::bench {

struct Outcome {
  // Whether every row arrived at its place. If not, `wrong` says what was wrong, and `seconds` is
  // empty.
  bool checked = false;
  std::string wrong;
  // For every repetition, by the GPU's clock: from before the first byte until the last has
  // arrived.
  std::vector<double> seconds;
};

// Runs measurements on the current GPU, one at a time.
class Runner {
 public:
  // Allocates GPU memory for all measurements of the plan, from the budget. RESOURCE_EXHAUSTED if
  // there is too little.
  static absl::StatusOr<Runner> Create(std::span<const Measurement> plan, MemoryBudget* budget);
  Runner(Runner&&) noexcept;
  ~Runner();

  // Moves the measurement's rows once and compares them with the pattern. Then times `repetitions`
  // repetitions, each with other rows. INTERNAL if CUDA fails; do not use the runner after that.
  // REQUIRES: memory is m.allocation.bytes long and holds the pattern. It holds the pattern again
  // if this returns OK and the outcome is checked.
  absl::StatusOr<Outcome> Run(const Measurement& m, int repetitions, std::span<std::byte> memory);

 private:
  struct Impl;
  explicit Runner(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace spillway::bench

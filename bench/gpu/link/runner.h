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
  // Whether every row arrived where it belongs; if not, what was wrong, and
  // nothing was timed.
  bool checked = false;
  std::string wrong;
  // Of every repetition, by the GPU's clock: from before the first byte until
  // the last has arrived.
  std::vector<double> seconds;
};

// Runs measurements on the current GPU, one at a time.
class Runner {
 public:
  // GPU memory for every measurement of the plan is taken here, from the
  // budget. RESOURCE_EXHAUSTED when there is too little.
  static absl::StatusOr<Runner> Create(std::span<const Measurement> plan, MemoryBudget* budget);
  Runner(Runner&&) noexcept;
  ~Runner();

  // Moves the measurement's rows once and compares them with the pattern,
  // then times `repetitions` of it, each over rows of its own. INTERNAL from
  // CUDA; afterwards nothing can be measured any more.
  // REQUIRES: memory holds the pattern, m.allocation.bytes long; it does so
  // again when this returns OK and the outcome is checked.
  absl::StatusOr<Outcome> Run(const Measurement& m, int repetitions, std::span<std::byte> memory);

 private:
  struct Impl;
  explicit Runner(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace spillway::bench

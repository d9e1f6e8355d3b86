#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace spillway {

// Memory for a step on a stream, in bytes.
struct StepMemory {
  int64_t device = 0;
  int64_t pinned = 0;  // for each announcement

  int64_t total() const { return device + pinned; }
  bool Holds(const StepMemory& needed) const {
    return device >= needed.device && pinned >= needed.pinned;
  }
};

// Returns the index of the smallest memory that is large enough; none if all are too small.
inline std::optional<size_t> FindStepMemory(std::span<const StepMemory> kept,
                                            const StepMemory& needed) {
  std::optional<size_t> found;
  for (size_t i = 0; i < kept.size(); ++i) {
    if (!kept[i].Holds(needed)) continue;
    if (!found.has_value() || kept[i].total() < kept[*found].total()) found = i;
  }
  return found;
}

}  // namespace spillway

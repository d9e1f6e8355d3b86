#pragma once

#include <cstdint>

namespace spillway {

// The method that ranks the keys; host/policy/methods.h has the properties of each. Values are
// those of the API minus 1.
enum class Selector : uint8_t {
  kAsymmetric,
  kHamming,
  kOracle,
  kAll,
  kInt4Keys,
  kQuest,
  kDoubleSparsity,
};

}  // namespace spillway

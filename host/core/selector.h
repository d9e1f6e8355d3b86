#pragma once

#include <cstdint>

namespace spillway {

// What ranks the keys; host/policy/methods.h says what each needs and gives.
// Values are the API's less one.
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

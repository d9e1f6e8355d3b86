#pragma once

namespace spillway {

// Step of the best uniform quantiser of B bits for a standard normal
// coordinate (Max 1960), B in [1, 4].
constexpr float QuantiserStep(int bits_per_dim) {
  constexpr float kStep[] = {1.596f, 0.9957f, 0.586f, 0.3352f};
  return kStep[bits_per_dim - 1];
}

}  // namespace spillway

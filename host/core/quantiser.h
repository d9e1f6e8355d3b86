#pragma once

namespace spillway {

// Step of the best uniform quantiser with 1 to 4 bits for a standard normal coordinate (Max 1960).
constexpr float QuantiserStep(int bits_per_dim) {
  constexpr float kStep[] = {1.596f, 0.9957f, 0.586f, 0.3352f};
  return kStep[bits_per_dim - 1];
}

}  // namespace spillway

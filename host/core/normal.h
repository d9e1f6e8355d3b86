#pragma once

namespace spillway {

// Inverse of the standard normal distribution function, for p in (0, 1). The absolute error is
// below 1e-9 for p in [1e-12, 1 - 1e-12] (Halley iterations on erfc).
double NormalQuantile(double p);

}  // namespace spillway

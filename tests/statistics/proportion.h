#pragma once

#include <cstdint>

namespace spillway {

#ifdef SPILLWAY_FEW_DRAWS
inline constexpr int kDrawsDivisor = 8;
#else
inline constexpr int kDrawsDivisor = 1;
#endif

// Wilson's score interval of a proportion (Wilson 1927) at 99 % confidence.
struct Interval {
  double low = 0;
  double high = 1;
};
Interval WilsonInterval(int64_t hits, int64_t draws);

// Upper end of the exact interval of Clopper and Pearson (1934), also at 99 % confidence.
double ClopperPearsonUpper(int64_t hits, int64_t draws);

}  // namespace spillway

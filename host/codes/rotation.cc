#include "host/codes/rotation.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace spillway {
namespace {

constexpr uint32_t kRotationDomain = 0x726f7461;  // "rota"

double Dot(const double* a, const double* b, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// x -= 2 v (v.x) for a unit vector v.
void Reflect(const double* v, double* x, int n) {
  const double twice = 2 * Dot(v, x, n);
  for (int i = 0; i < n; ++i) x[i] -= twice * v[i];
}

}  // namespace

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(p0)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

std::vector<double> Gaussians(size_t count, uint64_t seed, int layer, uint32_t domain) {
  const std::array<uint32_t, 2> key = {static_cast<uint32_t>(seed),
                                       static_cast<uint32_t>(seed >> 32)};
  std::vector<double> g(count);
  for (size_t i = 0; i < g.size(); i += 2) {
    const auto r =
        Philox4x32({static_cast<uint32_t>(i / 2), 0, static_cast<uint32_t>(layer), domain}, key);
    const uint64_t a = (uint64_t{r[1]} << 32 | r[0]) >> 11;
    const uint64_t b = (uint64_t{r[3]} << 32 | r[2]) >> 11;
    const double radius = std::sqrt(-2 * std::log(static_cast<double>(a + 1) * 0x1p-53));
    const double angle = 2 * std::numbers::pi * (static_cast<double>(b) * 0x1p-53);
    g[i] = radius * std::cos(angle);
    if (i + 1 < g.size()) g[i + 1] = radius * std::sin(angle);
  }
  return g;
}

std::vector<float> MakeRotation(int d, uint64_t seed, int layer) {
  // Column j of `a` becomes, above the diagonal, R's column j; at and below the diagonal, the unit
  // vector of reflection j.
  std::vector<double> a = Gaussians(static_cast<size_t>(d) * d, seed, layer, kRotationDomain);
  std::vector<double> sign(d);  // of R's diagonal
  bool negative = false;        // whether det(Q diag(sign)) < 0
  for (int j = 0; j < d; ++j) {
    double* v = &a[static_cast<size_t>(j) * d + j];
    const int n = d - j;
    const double norm = std::sqrt(Dot(v, v, n));
    // This sign avoids cancellation; R_jj = -copysign(norm, v_0).
    sign[j] = std::signbit(v[0]) ? 1 : -1;
    v[0] += std::copysign(norm, v[0]);
    const double length = std::sqrt(Dot(v, v, n));
    for (int i = 0; i < n; ++i) v[i] /= length;
    for (int k = j + 1; k < d; ++k) Reflect(v, &a[static_cast<size_t>(k) * d + j], n);
    // A reflection has determinant -1.
    negative ^= sign[j] > 0;
  }
  // Q = H_0 ... H_{d-1}. The signs of R's diagonal are moved into Q. Then R's diagonal is positive,
  // the factorisation is unique, and Q is Haar-distributed (Mezzadri, "How to generate random
  // matrices from the classical compact groups", 2007).
  std::vector<float> p(static_cast<size_t>(d) * d);
  std::vector<double> column(d);
  for (int k = 0; k < d; ++k) {
    std::fill(column.begin(), column.end(), 0.0);
    column[k] = sign[k];
    for (int j = d - 1; j >= 0; --j) {
      Reflect(&a[static_cast<size_t>(j) * d + j], &column[j], d - j);
    }
    if (negative) column[0] = -column[0];
    for (int i = 0; i < d; ++i) p[static_cast<size_t>(i) * d + k] = static_cast<float>(column[i]);
  }
  return p;
}

}  // namespace spillway

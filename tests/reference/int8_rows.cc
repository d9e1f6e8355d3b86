#include "tests/reference/int8_rows.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/reference/elements.h"

namespace spillway::reference {
namespace {

// |x|, cut to the bits that count for the order.
double Size(double x) {
  int exponent = 0;
  const double mantissa = std::frexp(std::fabs(x), &exponent);
  return std::ldexp(std::floor(std::ldexp(mantissa, 17)), exponent - 17);
}

// The smallest number with 7 bits that is not below x.
double RoundUp(double x) {
  if (x == 0) return 0;
  int exponent = 0;
  const double mantissa = std::frexp(x, &exponent);
  return std::ldexp(std::ceil(std::ldexp(mantissa, 7)), exponent - 7);
}

}  // namespace

std::vector<float> StoredVector(const std::vector<float>& x, int high_count, DType dtype) {
  std::vector<size_t> order(x.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return Size(x[a]) > Size(x[b]); });
  float rest = 0, largest = 0;
  for (size_t n = 0; n < order.size(); ++n) {
    const float size = std::fabs(x[order[n]]);
    largest = std::max(largest, size);
    if (n >= static_cast<size_t>(high_count)) rest = std::max(rest, size);
  }
  const double scale = RoundUp(std::max(rest / 127.0f, largest / 32384.0f));
  std::vector<float> stored(x.size(), 0.0f);
  const float inverse = scale > 0 ? 1 / static_cast<float>(scale) : 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const float element = std::nearbyint(x[i] * inverse);
    stored[i] = static_cast<float>(Round(dtype, static_cast<double>(element) * scale));
  }
  return stored;
}

Context Stored(Context context) {
  if (context.spec.row_type != RowType::kInt8) return context;
  const int d = context.spec.head_dim;
  const auto store = [&](std::vector<float>& all, int high_count) {
    for (size_t at = 0; at < all.size(); at += d) {
      const auto first = all.begin() + static_cast<std::ptrdiff_t>(at);
      const std::vector<float> stored =
          StoredVector({first, first + d}, high_count, context.spec.dtype);
      std::copy(stored.begin(), stored.end(), first);
    }
  };
  store(context.k, d < 32 ? 12 : 26);
  store(context.v, 4);
  return context;
}

}  // namespace spillway::reference

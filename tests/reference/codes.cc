#include "tests/reference/codes.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "host/model/model_spec.h"
#include "tests/reference/elements.h"

namespace spillway::reference {

std::vector<double> KeyCentre(const KeyValues& kv) {
  constexpr int64_t kCount = 1024;
  std::vector<double> centre(kv.d, 0.0);
  for (int64_t t = 0; t < kCount; ++t) {
    for (int i = 0; i < kv.d; ++i) centre[i] += kv.Key(t)[i] / kCount;
  }
  return centre;
}

std::vector<double> Rotated(std::span<const float> rotation, std::span<const double> x) {
  const size_t d = x.size();
  std::vector<double> y(d, 0.0);
  for (size_t j = 0; j < d; ++j) {
    for (size_t i = 0; i < d; ++i) y[j] += double{rotation[j * d + i]} * x[i];
  }
  return y;
}

double QuantiserStep(int bits) {
  constexpr double kStep[] = {1.596, 0.9957, 0.586, 0.3352};
  return kStep[bits - 1];
}

RotationCode EncodeRotated(std::span<const double> key, std::span<const double> centre,
                           std::span<const float> rotation, int bits) {
  const int d = static_cast<int>(key.size());
  const int top = (1 << bits) - 1;
  const double step = QuantiserStep(bits);
  std::vector<double> o(d);
  for (int i = 0; i < d; ++i) o[i] = key[i] - centre[i];
  const double length = Norm(o);
  if (length > 0) {
    for (double& x : o) x /= length;
  }
  const std::vector<double> rotated = Rotated(rotation, o);
  RotationCode code;
  code.border_distance = std::numeric_limits<double>::infinity();
  double product = 0;  // <P o, t>
  for (int j = 0; j < d; ++j) {
    const double y = std::sqrt(static_cast<double>(d)) * rotated[j];
    const int u = std::clamp(static_cast<int>(std::floor(y / step)) + (1 << (bits - 1)), 0, top);
    code.levels.push_back(u);
    product += rotated[j] * (u - top / 2.0) * step;
    // Beyond the outermost border the level no longer changes.
    const double border = std::clamp(std::nearbyint(y / step), 1.0 - (1 << (bits - 1)),
                                     static_cast<double>((1 << (bits - 1)) - 1));
    code.border_distance = std::min(code.border_distance, std::fabs(y - border * step));
  }
  if (!(length > 0) || !(product > 0)) return code;
  const double exact = length / product;
  code.factor = Round(DType::kBF16, exact);
  const double quantum = std::ldexp(1, std::ilogb(exact) - 7);
  code.factor_margin = (quantum / 2 - std::fabs(exact - code.factor)) / exact;
  return code;
}

QuantisedQuery QuantiseQuery(std::span<const double> q, std::span<const float> rotation) {
  const std::vector<double> rotated = Rotated(rotation, q);
  double largest = 0;
  for (double x : rotated) largest = std::max(largest, std::fabs(x));
  QuantisedQuery query;
  query.step = largest / 7.5;
  query.border_distance = std::numeric_limits<double>::infinity();
  for (double x : rotated) {
    const double at = query.step > 0 ? x / query.step : 0.5;
    query.levels.push_back(static_cast<int>(std::clamp(std::nearbyint(at - 0.5), -8.0, 7.0)));
    query.norm_sq += x * x;
    if (query.step > 0) {
      const double error = x - (query.levels.back() + 0.5) * query.step;
      query.error_sq += error * error;
    }
    // Borders are the integers -7 .. 7.
    const double border = std::clamp(std::nearbyint(at), -7.0, 7.0);
    query.border_distance = std::min(query.border_distance, std::fabs(at - border));
  }
  return query;
}

int64_t IntegerProduct(std::span<const int> key_levels, std::span<const int> query_levels,
                       int bits) {
  int64_t sum = 0;
  for (size_t j = 0; j < key_levels.size(); ++j) {
    sum += int64_t{2 * query_levels[j] + 1} * (2 * key_levels[j] - ((1 << bits) - 1));
  }
  return sum;
}

double AsymmetricLogit(const RotationCode& key, const QuantisedQuery& query, int bits,
                       double scale) {
  return scale * key.factor * (QuantiserStep(bits) * query.step / 4) *
         static_cast<double>(IntegerProduct(key.levels, query.levels, bits));
}

double RankVariance(std::span<const RotationCode> codes, std::span<const double> logits,
                    const QuantisedQuery& query, int bits, double scale) {
  constexpr double kDistortion[] = {0.3634, 0.1188, 0.03744, 0.01154};
  const double d = kDistortion[bits - 1];
  const double max = *std::max_element(logits.begin(), logits.end());
  double weight = 0, error = 0;
  for (size_t i = 0; i < codes.size(); ++i) {
    const double e = std::exp(logits[i] - max);
    weight += e;
    error += e * codes[i].factor * codes[i].factor;
  }
  const double factor = scale * (1 - d);
  return factor * factor * (d / (1 - d) * query.norm_sq + query.error_sq) * error / weight;
}

}  // namespace spillway::reference

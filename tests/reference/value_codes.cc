#include "tests/reference/value_codes.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>

#include "host/model/model_spec.h"
#include "tests/reference/codes.h"
#include "tests/reference/elements.h"

namespace spillway::reference {
namespace {

// The sign of entry i of a transform.
double Sign(int part, uint32_t i) {
  uint32_t h = i * 2654435769u + static_cast<uint32_t>(part) * 2135587861u + 1751213153u;
  h ^= h >> 16;
  h *= 2246822507u;
  h ^= h >> 13;
  return (h >> 15) % 2 == 1 ? -1 : 1;
}

double InBf16(double x) { return Round(DType::kBF16, static_cast<float>(x)); }

}  // namespace

std::vector<double> ValueTransform(int d) {
  int m = 1;
  while (2 * m <= d) m *= 2;
  std::vector<double> whole(static_cast<size_t>(d) * d, 0.0);
  for (int i = 0; i < d; ++i) whole[i * d + i] = 1;
  for (int part = 0; part < (m == d ? 1 : 2); ++part) {
    const int first = part == 0 ? 0 : d - m;
    std::vector<double> next = whole;
    for (int i = 0; i < m; ++i) {
      for (int column = 0; column < d; ++column) {
        double sum = 0;
        for (int j = 0; j < m; ++j) {
          const double entry = std::popcount(static_cast<unsigned>(i & j)) % 2 == 1 ? -1 : 1;
          sum += entry * Sign(part, j) * whole[(first + j) * d + column];
        }
        next[(first + i) * d + column] = sum / std::sqrt(m);
      }
    }
    whole = next;
  }
  return whole;
}

ValueCode EncodeValue(std::span<const double> value, std::span<const double> centre,
                      std::span<const double> transform, int bits) {
  const int d = static_cast<int>(value.size());
  std::vector<double> from(d), turned(d, 0.0), t(d);
  for (int i = 0; i < d; ++i) from[i] = value[i] - InBf16(centre[i]);
  for (int i = 0; i < d; ++i) {
    for (int j = 0; j < d; ++j) turned[i] += transform[i * d + j] * from[j];
  }
  ValueCode code;
  code.direction.assign(d, 0.0);
  const double length = Norm(from);
  const int levels = 1 << bits;
  for (int i = 0; i < d; ++i) {
    const double y = length > 0 ? std::sqrt(d) * turned[i] / length : 0;
    code.steps.push_back(y / QuantiserStep(bits));
    const double u = std::clamp(std::floor(code.steps[i]) + levels / 2, 0.0, levels - 1.0);
    t[i] = u - (levels - 1) / 2.0;
  }
  const double product = Dot(turned, t);
  code.factor = product > 0 ? InBf16(product / Dot(t, t)) : 0;
  for (int i = 0; i < d; ++i) {
    for (int j = 0; j < d; ++j) code.direction[j] += transform[i * d + j] * t[i];
  }
  return code;
}

double EstimatedWeight(double logit, double variance, double reference) {
  const double octaves = (logit - reference - std::min(variance, 2.0) / 2) / std::numbers::ln2;
  const double quarters = std::min(std::nearbyint(4 * octaves), 63.0);
  return quarters < -191 ? 0 : std::exp2(quarters / 4);
}

double CodeTerms::PredictedVariance(std::span<const uint32_t> tokens,
                                    std::span<const double> output) const {
  double apart = 0;
  for (size_t page = 0; page < centres.size(); ++page) {
    double weight = 0, square = 0;
    for (size_t i = 0; i < PageIndex::kPageTokens; ++i) {
      weight += weights[page * PageIndex::kPageTokens + i];
    }
    for (size_t j = 0; j < output.size(); ++j) {
      square += (centres[page][j] - output[j]) * (centres[page][j] - output[j]);
    }
    apart += weight * square;
  }
  apart /= sum();
  double mean = 0;
  for (const uint32_t t : tokens) {
    const double growth = std::exp(std::min(variances[t], 2.0));
    mean += weights[t] * weights[t] *
            ((growth - 1) * (distances_sq[t] + apart) +
             growth * distortions[t / PageIndex::kPageTokens] * distances_sq[t]) /
            static_cast<double>(tokens.size());
  }
  return mean;
}

double CodeTerms::sum() const {
  double sum = 0;
  for (const double w : weights) sum += w;
  return sum;
}

std::vector<double> CodeTerms::value_sum(int d) const {
  std::vector<double> sum(d, 0.0);
  for (const std::vector<double>& value : values) {
    for (size_t i = 0; i < value.size(); ++i) sum[i] += value[i];
  }
  return sum;
}

CodeTerms TermsOfCodes(const KeyValues& kv, const PageIndex& index, std::span<const double> logits,
                       std::span<const double> variances, double reference,
                       const std::vector<bool>& tail, const std::vector<bool>& summed, int bits) {
  const std::vector<double> transform = ValueTransform(kv.d);
  CodeTerms terms;
  terms.reference = reference;
  terms.weights.assign(kv.n, 0.0);
  terms.values.resize(kv.n);
  terms.distances_sq.assign(kv.n, 0.0);
  terms.variances.assign(variances.begin(), variances.end());
  // Of a standard normal coordinate: the mean of t^2, and the distortion.
  constexpr double kMeanSquare[] = {0.25, 0.8879, 2.8013};
  constexpr double kDistortion[] = {0.3634, 0.1188, 0.03744};
  const double distortion = kDistortion[bits - 1];
  constexpr int64_t kPage = PageIndex::kPageTokens;
  for (int64_t first = 0; first + kPage <= index.closed_token_count(); first += kPage) {
    const std::vector<double>& centre = index.value_centres[first / kPage];
    terms.centres.emplace_back();
    for (const double c : centre) terms.centres.back().push_back(InBf16(c));
    std::vector<ValueCode> codes(kPage);
    double largest = 0;
    for (int64_t i = 0; i < kPage; ++i) {
      if (!tail[first + i]) continue;
      const double weight = EstimatedWeight(logits[first + i], variances[first + i], reference);
      terms.weights[first + i] = weight;
      codes[i] = EncodeValue(kv.Value(first + i), centre, transform, bits);
      largest = std::max(largest, weight * codes[i].factor);
      terms.distances_sq[first + i] =
          codes[i].factor * codes[i].factor * kv.d * kMeanSquare[bits - 1] / (1 - distortion);
    }
    if (!summed[first / kPage]) largest = 0;
    terms.distortions.push_back(summed[first / kPage] ? distortion : 1.0);
    for (int64_t i = 0; i < kPage; ++i) {
      if (!tail[first + i]) continue;
      const double weight = terms.weights[first + i];
      const double of_code =
          largest > 0 ? std::nearbyint(127 * weight * codes[i].factor / largest) * largest / 127
                      : 0;
      std::vector<double>& value = terms.values[first + i];
      for (int j = 0; j < kv.d; ++j) {
        value.push_back(weight * InBf16(centre[j]) + of_code * codes[i].direction[j]);
      }
    }
  }
  return terms;
}

}  // namespace spillway::reference

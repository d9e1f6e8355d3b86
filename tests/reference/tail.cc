#include "tests/reference/tail.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace spillway::reference {

double TwoSidedQuantile(double delta) {
  double low = 0, high = 40;
  for (int i = 0; i < 200; ++i) {
    const double z = (low + high) / 2;
    (std::erfc(z / std::sqrt(2.0)) > delta ? low : high) = z;
  }
  return low;
}

double ErrorQuantile(double degrees, double delta) {
  const double two_sided = TwoSidedQuantile(delta);
  const double z1 = TwoSidedQuantile(2 * delta);
  const double part = 2 / (9 * degrees);
  return std::min(two_sided, std::sqrt(std::pow(1 - part + z1 * std::sqrt(part), 3)));
}

namespace {

// x v and x of a row, in units of exp(max); with codes, x v - x^ v^ and x - x^.
struct RowTerm {
  double weight = 0;
  std::vector<double> value;
};
RowTerm TermOf(const KeyValues& kv, std::span<const double> logits, double max, uint32_t t,
               const CodeTerms* codes) {
  RowTerm term{std::exp(logits[t] - max), {}};
  for (const double v : kv.Value(t)) term.value.push_back(term.weight * v);
  if (codes == nullptr || codes->weights[t] == 0) return term;
  const double unit = std::exp(codes->reference - max);
  term.weight -= unit * codes->weights[t];
  for (int i = 0; i < kv.d; ++i) term.value[i] -= unit * codes->values[t][i];
  return term;
}

}  // namespace

Moments TwoPassMoments(const KeyValues& kv, std::span<const double> logits, double max,
                       std::span<const uint32_t> tokens, std::span<const double> o,
                       const CodeTerms* codes) {
  const double m = static_cast<double>(tokens.size());
  const int d = kv.d;
  std::vector<RowTerm> terms;
  for (uint32_t t : tokens) terms.push_back(TermOf(kv, logits, max, t, codes));
  double mean_x = 0;
  std::vector<double> mean_n(d, 0.0), mean_o(d, 0.0);
  for (const RowTerm& term : terms) {
    mean_x += term.weight / m;
    for (int i = 0; i < d; ++i) {
      mean_n[i] += term.value[i] / m;
      mean_o[i] += (term.value[i] - term.weight * o[i]) / m;
    }
  }
  Moments moments;
  const auto square = [](double x) { return x * x; };
  for (const RowTerm& term : terms) {
    moments.variance_x += square(term.weight - mean_x) / (m - 1);
    for (int i = 0; i < d; ++i) {
      moments.trace_n += square(term.value[i] - mean_n[i]) / (m - 1);
      moments.trace_o += square(term.value[i] - term.weight * o[i] - mean_o[i]) / (m - 1);
    }
  }
  return moments;
}

namespace {

constexpr int kProjected = 16;

// Adds what the rows of a stratum contribute to the covariance of the projected error.
void AddProjected(const KeyValues& kv, std::span<const double> logits, double max,
                  const SampledTokens& stratum, std::span<const double> o,
                  std::span<const double> signs, const CodeTerms* codes,
                  std::vector<double>& covariance) {
  const double n = static_cast<double>(stratum.token_count);
  const double r = static_cast<double>(stratum.tokens.size());
  if (r < 2 || r >= n) return;
  std::vector<std::vector<double>> rows;
  std::vector<double> mean(kProjected, 0.0);
  for (const uint32_t t : stratum.tokens) {
    const RowTerm term = TermOf(kv, logits, max, t, codes);
    rows.emplace_back(kProjected, 0.0);
    for (int i = 0; i < kv.d; ++i) {
      rows.back()[i % kProjected] += signs[i] * (term.value[i] - term.weight * o[i]);
    }
    for (int a = 0; a < kProjected; ++a) mean[a] += rows.back()[a] / r;
  }
  for (const std::vector<double>& row : rows) {
    for (int a = 0; a < kProjected; ++a) {
      for (int b = 0; b < kProjected; ++b) {
        covariance[a * kProjected + b] +=
            n * n * (1 / r - 1 / n) / (r - 1) * (row[a] - mean[a]) * (row[b] - mean[b]);
      }
    }
  }
}

// Variance that the projection may hide counts as one direction. The projection adds each dimension
// to d / 16 - 1 of the d - 1 others, and so shows the inverse of nu as 1 / nu + (1 - 1 / nu) times
// this share, which is corrected here. At most 64 and d.
double Degrees(int d, double variance, std::span<const double> covariance) {
  double trace = 0, square = 0;
  for (int a = 0; a < kProjected; ++a) trace += covariance[a * kProjected + a];
  for (const double entry : covariance) square += entry * entry;
  const double hidden = std::max(variance - trace, 0.0);
  const double root = (std::sqrt(square) + hidden) / std::max(variance, trace);
  const double share = (d / 16.0 - 1) / (d - 1.0);
  const double inverse = (root * root - share) / (1 - share);
  const double most = std::min(64, d);
  return inverse >= 1 ? 1 : inverse <= 1 / most ? most : 1 / inverse;
}

}  // namespace

Estimate EstimateOutput(const KeyValues& kv, std::span<const double> logits,
                        std::span<const uint32_t> exact, std::span<const SampledTokens> strata,
                        std::span<const double> signs, const CodeTerms* codes,
                        std::span<const std::vector<uint32_t>> predicted) {
  Estimate e;
  e.max = -std::numeric_limits<double>::infinity();
  for (uint32_t t : exact) e.max = std::max(e.max, logits[t]);
  for (const SampledTokens& s : strata) {
    for (uint32_t t : s.tokens) e.max = std::max(e.max, logits[t]);
  }
  e.numerator.assign(kv.d, 0.0);
  const auto add = [&](uint32_t t, double weight) {
    const RowTerm term = TermOf(kv, logits, e.max, t, codes);
    e.denominator += weight * term.weight;
    for (int i = 0; i < kv.d; ++i) e.numerator[i] += weight * term.value[i];
  };
  for (uint32_t t : exact) add(t, 1);
  e.exact_denominator = e.denominator;
  if (codes != nullptr) {
    const double unit = std::exp(codes->reference - e.max);
    e.denominator += unit * codes->sum();
    const std::vector<double> values = codes->value_sum(kv.d);
    for (int i = 0; i < kv.d; ++i) e.numerator[i] += unit * values[i];
  }
  for (const SampledTokens& s : strata) {
    for (uint32_t t : s.tokens) {
      add(t, static_cast<double>(s.token_count) / static_cast<double>(s.tokens.size()));
    }
  }
  std::vector<double> o(e.numerator);
  for (double& x : o) x /= e.denominator;
  double norm_variance = 0;
  std::vector<double> covariance(kProjected * kProjected, 0.0);
  for (const SampledTokens& s : strata) {
    const double n = static_cast<double>(s.token_count);
    const double r = static_cast<double>(s.tokens.size());
    Moments m =
        s.tokens.size() > 1 ? TwoPassMoments(kv, logits, e.max, s.tokens, o, codes) : Moments();
    if (!predicted.empty()) {
      const std::vector<uint32_t>& tokens = predicted[&s - strata.data()];
      const double unit = std::exp(codes->reference - e.max);
      const double mean = unit * unit * codes->PredictedVariance(tokens, o);
      m.trace_o = std::max(m.trace_o, ((r - 1) * m.trace_o + 8 * mean) / (r - 1 + 8));
    }
    e.moments.push_back(m);
    e.variance += n * n * (1 / r - 1 / n) * m.trace_o;
    norm_variance += n * n * (1 / r - 1 / n) * m.trace_n;
    if (!signs.empty()) AddProjected(kv, logits, e.max, s, o, signs, codes, covariance);
  }
  if (!signs.empty()) e.degrees = Degrees(kv.d, e.variance, covariance);
  e.norm_sq_unbiased = std::max(Dot(e.numerator, e.numerator) - norm_variance, 0.0);
  return e;
}

int64_t UniformRows(Bound bound, const Estimate& pilot, int64_t token_count, double inflation,
                    double epsilon, double delta) {
  if (pilot.norm_sq_unbiased == 0) return token_count;
  const double n = static_cast<double>(token_count);
  const double norm = std::sqrt(pilot.norm_sq_unbiased);
  const Moments& m = pilot.moments.front();
  // sqrt(b) times the deviation of the estimate with b rows.
  const auto deviation = [&](double z, double variance) {
    return z * n * inflation * std::sqrt(variance);
  };
  const double z = TwoSidedQuantile(delta), half_z = TwoSidedQuantile(delta / 2);
  double root = 0;
  switch (bound) {
    case Bound::kDenominator:
      root = deviation(z, m.variance_x) / (epsilon * pilot.denominator);
      break;
    case Bound::kPaper:
      root = deviation(half_z, m.trace_n) / (epsilon / 2 * norm) +
             deviation(half_z, m.variance_x) / (epsilon / 2 * pilot.denominator);
      break;
    case Bound::kRatio:
      root = deviation(ErrorQuantile(pilot.degrees, delta), m.trace_o) / (epsilon * norm);
      break;
  }
  const double b = root * root;
  return static_cast<int64_t>(std::ceil(b * n / (b + n)));
}

std::vector<int64_t> StratifiedRows(const Estimate& pilot, std::span<const SampledTokens> drawn,
                                    double inflation, double epsilon, double delta) {
  if (pilot.norm_sq_unbiased == 0) {
    std::vector<int64_t> all;
    for (const SampledTokens& s : drawn) all.push_back(s.token_count);
    return all;
  }
  const double z = ErrorQuantile(pilot.degrees, delta);
  const double allowed = epsilon * epsilon * pilot.norm_sq_unbiased / (z * z);
  // The smallest total has b_h = rate n_h T_h, except where that is below the rows drawn or above
  // the tokens of the stratum. The rate is the smallest that suffices.
  const auto rows = [&](double rate) {
    std::vector<double> b;
    for (size_t h = 0; h < drawn.size(); ++h) {
      const double n = static_cast<double>(drawn[h].token_count);
      const double spread = n * inflation * std::sqrt(pilot.moments[h].trace_o);
      b.push_back(std::clamp(rate * spread, static_cast<double>(drawn[h].tokens.size()), n));
    }
    return b;
  };
  const auto variance = [&](const std::vector<double>& b) {
    double sum = 0;
    for (size_t h = 0; h < drawn.size(); ++h) {
      const double n = static_cast<double>(drawn[h].token_count);
      const double spread_sq = n * n * inflation * inflation * pilot.moments[h].trace_o;
      sum += spread_sq * (1 / b[h] - 1 / n);
    }
    return sum;
  };
  double low = 1e-300, high = 1e300;
  for (int i = 0; i < 2000 && high / low > 1 + 1e-12; ++i) {
    const double rate = std::sqrt(low) * std::sqrt(high);
    (variance(rows(rate)) <= allowed ? high : low) = rate;
  }
  std::vector<int64_t> whole;
  for (const double b : rows(high)) whole.push_back(static_cast<int64_t>(std::ceil(b - 1e-9)));
  return whole;
}

double AllottedVariance(std::span<const double> token_counts, std::span<const double> deviations,
                        std::span<const int64_t> rows) {
  double variance = 0;
  for (size_t h = 0; h < rows.size(); ++h) {
    const double spread = token_counts[h] * deviations[h];
    if (spread == 0) continue;
    variance += spread * spread * (1 / static_cast<double>(rows[h]) - 1 / token_counts[h]);
  }
  return variance;
}

}  // namespace spillway::reference

#include "bench/gpu/attend_check.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "host/base/elements.h"
#include "tbb/parallel_for.h"

namespace spillway::bench {
namespace {

constexpr int64_t kSegmentRows = 4096;

// The softmax sums of a query head over some rows. Without rows, the maximum is -inf.
struct SoftmaxSum {
  double max = -std::numeric_limits<double>::infinity();
  double sum = 0;
  std::vector<double> value;  // [d]

  void Rescale(double to) {
    if (to == max) return;
    const double factor = std::exp(max - to);
    sum *= factor;
    for (double& x : value) x *= factor;
    max = to;
  }
  void Add(double logit, const float* v) {
    Rescale(std::max(max, logit));
    const double weight = std::exp(logit - max);
    sum += weight;
    for (size_t j = 0; j < value.size(); ++j) value[j] += weight * v[j];
  }
  void Merge(SoftmaxSum other) {
    if (other.sum == 0) return;
    const double larger = std::max(max, other.max);
    Rescale(larger);
    other.Rescale(larger);
    sum += other.sum;
    for (size_t j = 0; j < value.size(); ++j) value[j] += other.value[j];
  }
};

// A row that is attended, and the log of its weight.
struct Row {
  int64_t token = 0;
  double log_weight = 0;
};

// Attention over count(kv_head) rows of each KV head; row(kv_head, i) returns the i-th.
template <typename Count, typename RowAt>
std::vector<double> Attention(const ModelSpec& spec, const LayerRows& rows,
                              std::span<const float> q, const Count& count, const RowAt& row) {
  const int64_t d = spec.head_dim;
  const int64_t group = spec.group();
  int64_t rows_max = 0;
  for (int h = 0; h < spec.kv_head_count; ++h) rows_max = std::max(rows_max, count(h));
  const int64_t segments = (rows_max + kSegmentRows - 1) / kSegmentRows;
  // [H_kv][segments][group]
  std::vector<SoftmaxSum> parts(spec.query_head_count * segments,
                                SoftmaxSum{.value = std::vector<double>(d)});
  tbb::parallel_for(int64_t{0}, spec.kv_head_count * segments, [&](int64_t part) {
    const int kv_head = static_cast<int>(part / segments);
    const int64_t begin = part % segments * kSegmentRows;
    const int64_t end = std::min(begin + kSegmentRows, count(kv_head));
    std::vector<float> kv(2 * d);
    for (int64_t i = begin; i < end; ++i) {
      const Row at = row(kv_head, i);
      ToFloat(spec.dtype, rows.Row(kv_head, at.token), 2 * d, kv.data());
      for (int64_t g = 0; g < group; ++g) {
        const float* query = q.data() + (kv_head * group + g) * d;
        const double dot =
            std::transform_reduce(query, query + d, kv.data(), 0.0, std::plus<>(),
                                  [](float a, float b) { return double{a} * double{b}; });
        parts[part * group + g].Add(dot * spec.softmax_scale + at.log_weight, kv.data() + d);
      }
    }
  });
  std::vector<double> out;
  for (int h = 0; h < spec.query_head_count; ++h) {
    SoftmaxSum whole{.value = std::vector<double>(d)};
    for (int64_t s = 0; s < segments; ++s) {
      whole.Merge(parts[(h / group * segments + s) * group + h % group]);
    }
    for (const double x : whole.value) out.push_back(x / whole.sum);
  }
  return out;
}

}  // namespace

std::vector<double> DenseAttention(const ModelSpec& spec, const LayerRows& rows,
                                   std::span<const float> q, int64_t n) {
  return Attention(
      spec, rows, q, [n](int) { return n; },
      [](int, int64_t i) {
        return Row{i, 0};
      });
}

std::vector<double> SelectedAttention(const ModelSpec& spec, const LayerRows& rows,
                                      std::span<const float> q,
                                      std::span<const Selection> selections) {
  return Attention(
      spec, rows, q,
      [&](int kv_head) { return static_cast<int64_t>(selections[kv_head].indices.size()); },
      [&](int kv_head, int64_t i) {
        const Selection& s = selections[kv_head];
        return Row{s.indices[i], s.log_weights[i]};
      });
}

std::vector<double> RelativeErrors(const ModelSpec& spec, std::span<const float> out,
                                   std::span<const double> wanted) {
  const int d = spec.head_dim;
  std::vector<double> errors;
  for (int h = 0; h < spec.query_head_count; ++h) {
    double error = 0, norm = 0;
    for (int j = h * d; j < (h + 1) * d; ++j) {
      error += (out[j] - wanted[j]) * (out[j] - wanted[j]);
      norm += wanted[j] * wanted[j];
    }
    errors.push_back(std::sqrt(error / norm));
  }
  return errors;
}

}  // namespace spillway::bench

// Contexts that could mislead the ranks from codes, or a sample: promises must hold for them too.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/conformance/device_bench.h"
#include "tests/statistics/proportion.h"

namespace spillway {
namespace {

using reference::Context;

constexpr int kD = 64;
constexpr int kGroup = 4;
constexpr int kKvHeads = 2;
constexpr int kQueries = 16;
constexpr int64_t kTokens = 4096;

// A context and queries [T][H_q][d] over it.
struct Family {
  Context context;
  std::vector<float> q;
};

// Changes the data of one KV head and its queries: k and v [n][d], q [T * G][d].
using Change = std::function<void(std::mt19937_64&, std::vector<double>& k, std::vector<double>& v,
                                  std::vector<double>& q)>;

std::vector<double> NormalVector(std::mt19937_64& random, size_t size) {
  std::normal_distribution<double> normal;
  std::vector<double> x(size);
  for (double& e : x) e = normal(random);
  return x;
}

// Keys are mixtures of 24 directions of decreasing size, plus noise. Values scatter about a mean.
// Queries point towards a key.
Family MakeFamily(const ModelSpec& spec, uint64_t seed, const Change& change) {
  constexpr int kRank = 24;
  Family family{{spec, kTokens, {}, {}}, std::vector<float>(kQueries * kKvHeads * kGroup * kD)};
  for (int h = 0; h < kKvHeads; ++h) {
    std::mt19937_64 random(seed * 100 + h);
    std::uniform_real_distribution<double> uniform(0.2, 1.2);
    std::normal_distribution<double> normal;
    const std::vector<double> basis = NormalVector(random, kRank * kD);
    const std::vector<double> mean = NormalVector(random, kD);
    std::vector<double> k(kTokens * kD), v(kTokens * kD), q(kQueries * kGroup * kD);
    for (int64_t t = 0; t < kTokens; ++t) {
      const std::vector<double> a = NormalVector(random, kRank);
      for (int i = 0; i < kD; ++i) {
        double& key = k[t * kD + i];
        key = 0.5 * normal(random);
        for (int r = 0; r < kRank; ++r) key += a[r] * basis[r * kD + i] / std::sqrt(1.0 + r);
        v[t * kD + i] = normal(random) + 0.7 * mean[i];
      }
    }
    for (int row = 0; row < kQueries * kGroup; ++row) {
      const int64_t towards = static_cast<int64_t>(random() % kTokens);
      const double along = 1.2 * uniform(random);
      for (int i = 0; i < kD; ++i) {
        q[row * kD + i] = along * k[towards * kD + i] + 0.7 * normal(random);
      }
    }
    change(random, k, v, q);
    family.context.k.insert(family.context.k.end(), k.begin(), k.end());
    family.context.v.insert(family.context.v.end(), v.begin(), v.end());
    for (int t = 0; t < kQueries; ++t) {
      std::copy_n(q.begin() + t * kGroup * kD, kGroup * kD,
                  family.q.begin() + (t * kKvHeads + h) * kGroup * kD);
    }
  }
  return family;
}

// Replaces each query's component along an axis by `left` times the axis.
void PutAcross(const std::vector<double>& axis, double left, std::vector<double>& q) {
  double length_sq = 0;
  for (const double e : axis) length_sq += e * e;
  for (size_t row = 0; row < q.size(); row += kD) {
    double along = 0;
    for (int i = 0; i < kD; ++i) along += q[row + i] * axis[i] / length_sq;
    for (int i = 0; i < kD; ++i) q[row + i] += (left - along) * axis[i];
  }
}

class Families : public ::testing::TestWithParam<DeviceFactory> {
 protected:
  Families() : spec_(MakeSpec(kKvHeads, kGroup, kD, DType::kF32)), bench_(GetParam(), spec_) {}

  struct Counts {
    int64_t outputs = 0;
    int64_t statistical = 0;
    int64_t broken = 0;  // of these, errors beyond epsilon
    int64_t off = 0;     // EXACT or an error of 0, but the output is not exact
    double rows = 0;     // mean rows touched
  };
  Counts Count(const Family& family, int seeds) {
    BenchSequence sequence(bench_);
    EXPECT_TRUE(sequence.Append(family.context, 0, kTokens).ok());
    const std::vector<int64_t> visible(kQueries, kTokens);
    std::vector<reference::Attention> exact;
    for (int t = 0; t < kQueries; ++t) {
      for (int h = 0; h < kKvHeads * kGroup; ++h) {
        exact.push_back(reference::DenseAttention(family.context.Head(h / kGroup),
                                                  reference::Query(spec_, family.q, t, h),
                                                  spec_.softmax_scale, kTokens));
      }
    }
    Counts counts;
    Policy policy = DefaultPolicy(spec_);
    for (policy.seed = 0; policy.seed < static_cast<uint64_t>(seeds); ++policy.seed) {
      const JobItem item = sequence.Attend(policy, family.q, visible);
      EXPECT_TRUE(item.status.ok()) << item.status;
      for (int row = 0; row < kQueries * kKvHeads * kGroup; ++row) {
        const Certificate& c = item.result.certificates[row];
        const double error = reference::RelativeDistance(
            OutputOf(spec_, item.result, row / (kKvHeads * kGroup), row % (kKvHeads * kGroup)),
            exact[row].out);
        ++counts.outputs;
        counts.statistical += c.promise == Promise::kStatistical;
        counts.broken += c.promise == Promise::kStatistical && error > policy.epsilon;
        counts.off += (c.promise == Promise::kExact || c.relative_error == 0) && error > 1e-4;
      }
      for (const int64_t rows : item.result.touched_row_counts) {
        counts.rows += static_cast<double>(rows) /
                       static_cast<double>(seeds * item.result.touched_row_counts.size());
      }
    }
    return counts;
  }

  // Expects that most outputs have a promise, from less than half of the rows, and that the
  // promises hold.
  void ExpectKept(const std::string& name, const Change& change) {
    const Counts counts = Count(MakeFamily(spec_, 7, change), 6);
    RecordProperty(name, std::to_string(counts.broken) + " of " +
                             std::to_string(counts.statistical) + ", rows " +
                             std::to_string(counts.rows));
    EXPECT_GT(counts.statistical, counts.outputs * 3 / 4) << name;
    EXPECT_LT(counts.rows, 0.5 * kTokens) << name;
    EXPECT_LT(ClopperPearsonUpper(counts.broken, counts.statistical), DefaultPolicy(spec_).delta)
        << name << ": " << counts.broken << " of " << counts.statistical;
    EXPECT_EQ(counts.off, 0) << name;
  }

  const ModelSpec spec_;
  DeviceBench bench_;
};

// Attention is flat. One value in 200 is forty times as large as the mean length.
TEST_P(Families, RareValues) {
  ExpectKept("rare values", [](std::mt19937_64& random, std::vector<double>&,
                               std::vector<double>& v, std::vector<double>& q) {
    for (double& e : q) e *= 0.3;
    const std::vector<double> mean = NormalVector(random, kD), axis = NormalVector(random, kD);
    for (size_t i = 0; i < v.size(); ++i) v[i] = 0.3 * v[i] + 0.5 * mean[i % kD];
    double length = 0;
    for (size_t at = 0; at < v.size(); at += kD) {
      double square = 0;
      for (int i = 0; i < kD; ++i) square += v[at + i] * v[at + i];
      length += std::sqrt(square) / kTokens;
    }
    for (size_t at = 0; at < v.size(); at += kD) {
      if (random() % 200 != 0) continue;
      for (int i = 0; i < kD; ++i) v[at + i] = 40 * length * axis[i] / std::sqrt(kD);
    }
  });
}

// Keys from token 1,024 on are shifted in a direction that no query sees.
TEST_P(Families, KeysThatMove) {
  ExpectKept("keys that move", [](std::mt19937_64& random, std::vector<double>& k,
                                  std::vector<double>&, std::vector<double>& q) {
    const std::vector<double> axis = NormalVector(random, kD);
    for (int64_t i = 1024 * kD; i < kTokens * kD; ++i) k[i] += 40 * axis[i % kD];
    PutAcross(axis, 0, q);
  });
}

// One of the first keys is an outlier, in a direction where its logit is very low.
TEST_P(Families, AnOutlier) {
  ExpectKept("an outlier", [](std::mt19937_64& random, std::vector<double>& k, std::vector<double>&,
                              std::vector<double>& q) {
    std::vector<double> axis = NormalVector(random, kD);
    const double length =
        std::sqrt(std::inner_product(axis.begin(), axis.end(), axis.begin(), 0.0));
    for (int i = 0; i < kD; ++i) {
      axis[i] /= length;
      k[500 * kD + i] = 1e5 * axis[i];
    }
    PutAcross(axis, -0.01, q);
  });
}

// Nearly all values are 0: a sample says nothing about the others.
TEST_P(Families, ValuesThatAreNearlyAllZero) {
  for (const int64_t first : {0, 1024}) {  // 1024: all of the first values are 0 too
    const Counts counts = Count(MakeFamily(spec_, 8,
                                           [&](std::mt19937_64& random, std::vector<double>&,
                                               std::vector<double>& v, std::vector<double>&) {
                                             for (int64_t t = 0; t < kTokens; ++t) {
                                               if (t >= first && random() % 250 == 0) continue;
                                               std::fill_n(v.begin() + t * kD, kD, 0.0);
                                             }
                                           }),
                                2);
    EXPECT_EQ(counts.statistical, 0) << counts.broken << " of them broken";
    EXPECT_EQ(counts.off, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, Families, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway

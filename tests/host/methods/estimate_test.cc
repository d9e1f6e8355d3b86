// Estimates from the indices that pages hold beside codes: with every instruction set, they have
// the same bits as the scalar code of host/core.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "host/base/elements.h"
#include "host/methods/int4_keys/int4_elements.h"
#include "host/methods/int4_keys/int4_range.h"
#include "host/methods/lsh_sampling/count_shared.h"
#include "host/methods/quest/page_bounds.h"
#include "host/methods/weights/key_sections.h"
#include "tests/host/cpu/targets.h"

namespace spillway {
namespace {

constexpr int kKeys = kPageTokenCount;

// Compares bits, so that NaN equals NaN.
void ExpectSameBits(const std::vector<float>& got, const std::vector<float>& wanted,
                    const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(wanted[i]))
        << what << " at " << i << ": " << got[i] << ", not " << wanted[i];
  }
}

struct Int4Case {
  int channels, heads;
  std::vector<float> q;
  std::vector<uint32_t> words;  // [channels / 8 + 1][128]
  Int4Query query;

  Int4Case(int channels_in, int heads_in) : channels(channels_in), heads(heads_in) {
    std::mt19937 random(channels * 100 + heads);
    std::normal_distribution<float> normal;
    q.resize(static_cast<size_t>(heads) * channels);
    for (float& x : q) x = normal(random);
    words.resize(static_cast<size_t>(channels / 8 + 1) * kKeys);
    for (uint32_t& w : words) w = static_cast<uint32_t>(random());
    for (int t = 0; t < kKeys; ++t) SetRange(t, Int4Range::Of(normal(random), 4));
    query = {heads, channels, q.data(), {}};
    for (int h = 0; h < heads; ++h) {
      for (int i = 0; i < channels; ++i) query.sum[h] += q[h * channels + i];
    }
  }
  void SetRange(int t, Int4Range range) { words[channels / 8 * kKeys + t] = range.Pack(); }

  std::vector<float> Wanted() const {
    std::vector<float> logits;
    for (int h = 0; h < heads; ++h) {
      for (int t = 0; t < kKeys; ++t) {
        float dot = 0;
        for (int i = 0; i < channels; ++i) {
          const uint32_t u = words[i / 8 * kKeys + t] >> (4 * (i % 8)) & 15u;
          dot = std::fma(q[h * channels + i], static_cast<float>(u), dot);
        }
        const Int4Range range = Int4Range::Unpack(words[channels / 8 * kKeys + t]);
        logits.push_back(CutEstimate(range.Dot(dot, query.sum[h])));
      }
    }
    return logits;
  }
  std::vector<float> Got() const {
    std::vector<float> logits(static_cast<size_t>(heads) * kKeys, -7.0f);
    Int4Logits(query, reinterpret_cast<const std::byte*>(words.data()), logits.data());
    return logits;
  }
};

TEST(Int4Logits, MatchTheScalarFormBitForBit) {
  for (const int channels : {8, 16, 24, 64, 80, 128, 256}) {
    for (int heads = 1; heads <= kGroupMax; ++heads) {
      Int4Case c(channels, heads);
      // Ranges at the limits of fp16: zero, subnormal, and the largest numbers.
      c.SetRange(3, {0, 0});
      c.SetRange(4, {-0.0f, std::ldexp(1.0f, -24)});
      c.SetRange(5, {-65504, 65504});
      c.SetRange(6, {std::ldexp(1.0f, -24), std::ldexp(1.0f, -15)});
      const std::vector<float> wanted = c.Wanted();
      SameOnEveryTarget([&](std::vector<std::byte>& out) {
        const std::vector<float> got = c.Got();
        ExpectSameBits(got, wanted, std::to_string(channels) + " channels");
        AppendBytes(got, out);
      });
    }
  }
}

TEST(Int4Logits, HugeQueriesAreCut) {
  Int4Case c(64, 3);
  for (float& x : c.q) x = x > 0 ? 1e37f : -3e37f;
  for (int h = 0; h < 3; ++h) {
    c.query.sum[h] = 0;
    for (int i = 0; i < 64; ++i) c.query.sum[h] += c.q[h * 64 + i];
  }
  c.query.sum[2] = std::numeric_limits<float>::infinity();
  for (int t = 0; t < kKeys; t += 2) c.SetRange(t, {-65504, 65504});
  const std::vector<float> wanted = c.Wanted();
  SameOnEveryTarget([&](std::vector<std::byte>& out) {
    const std::vector<float> got = c.Got();
    ExpectSameBits(got, wanted, "huge");
    for (const float l : got) EXPECT_LE(std::fabs(l), kEstimateMax);
    AppendBytes(got, out);
  });
}

TEST(CountShared, CountsEqualNames) {
  std::mt19937 random(12);
  for (const int tables : {1, 2, 3, 40, 75, 512}) {
    for (const int names : {2, 16, 65536}) {
      std::vector<uint16_t> buckets(static_cast<size_t>(tables) * kKeys), query(tables);
      for (uint16_t& b : buckets) b = static_cast<uint16_t>(random() % names);
      for (uint16_t& b : query) b = static_cast<uint16_t>(random() % names);
      for (int i = 0; i < tables; ++i) buckets[i * kKeys + 77] = query[i];  // shares all
      SameOnEveryTarget([&](std::vector<std::byte>& out) {
        std::vector<uint16_t> counts(kKeys, 9999);
        CountShared(query.data(), tables, reinterpret_cast<const std::byte*>(buckets.data()),
                    counts.data());
        for (int t = 0; t < kKeys; ++t) {
          int wanted = 0;
          for (int i = 0; i < tables; ++i) wanted += buckets[i * kKeys + t] == query[i];
          ASSERT_EQ(counts[t], wanted) << t;
        }
        ASSERT_EQ(counts[77], tables);
        AppendBytes(counts, out);
      });
    }
  }
}

TEST(BoundLogits, MatchTheScalarFormBitForBit) {
  std::mt19937 random(13);
  std::normal_distribution<float> normal;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int d : {16, 80, 256}) {
      for (const int pages : {1, 2, 4, 8}) {
        for (const int heads : {1, 3, 16}) {
          std::vector<float> bounds(2 * d * pages), q(heads * d);
          for (int i = 0; i < d * pages; ++i) {
            const float a = normal(random), b = normal(random);
            bounds[i] = std::min(a, b);
            bounds[d * pages + i] = std::max(a, b);
          }
          for (float& x : q) x = normal(random);
          q[1] = 0;
          std::vector<std::byte> section(bounds.size() * DTypeBytes(dtype));
          FromFloat(dtype, bounds.data(), static_cast<int64_t>(bounds.size()), section.data());
          ToFloat(dtype, section.data(), static_cast<int64_t>(bounds.size()), bounds.data());
          RowQueries queries;
          queries.head_count = heads;
          queries.head_dim = d;
          queries.scaled = q.data();
          std::vector<float> wanted;
          for (int h = 0; h < heads; ++h) {
            for (int t = 0; t < kKeys; ++t) {
              const int page = t / (kKeys / pages);
              float sum = 0;
              for (int i = 0; i < d; ++i) {
                sum += std::max(q[h * d + i] * bounds[i * pages + page],
                                q[h * d + i] * bounds[(d + i) * pages + page]);
              }
              wanted.push_back(CutEstimate(sum));
            }
          }
          SameOnEveryTarget([&](std::vector<std::byte>& out) {
            std::vector<float> got(static_cast<size_t>(heads) * kKeys, -7.0f);
            BoundLogits(dtype, queries, pages, section.data(), got.data());
            ExpectSameBits(got, wanted, std::to_string(pages) + " pages");
            AppendBytes(got, out);
          });
        }
      }
    }
  }
}

// The sections follow each other and do not overlap.
TEST(KeySections, FollowEachOther) {
  ModelSpec spec;
  spec.head_dim = 80;
  spec.dtype = DType::kBF16;
  spec.indices = {.int4_keys = true,
                  .quest_page_token_count = 16,
                  .label_channel_count = 24,
                  .lsh_table_count = 75,
                  .lsh_bits = 8};
  const KeySections s = KeySections::Of(spec);
  EXPECT_EQ(s.int4_keys(), 0);
  EXPECT_EQ(s.labels(), 11 * 128 * 4);
  EXPECT_EQ(s.bounds() - s.labels(), 4 * 128 * 4);
  EXPECT_EQ(s.buckets() - s.bounds(), 2 * 80 * 8 * 2);
  EXPECT_EQ(s.bytes() - s.buckets(), 75 * 128 * 2);
  EXPECT_EQ(s.bound_page_tokens(), 16);
  EXPECT_EQ(KeySections::Of(ModelSpec()).bytes(), 0);
}

}  // namespace
}  // namespace spillway

#include "host/methods/lsh_sampling/lsh_tail.h"

#include <algorithm>
#include <cmath>

#include "host/base/elements.h"
#include "host/base/parallel.h"
#include "host/cpu/kernels.h"
#include "host/methods/lsh_sampling/count_shared.h"
#include "host/methods/lsh_sampling/lsh_index.h"
#include "host/methods/lsh_sampling/lsh_sampling.h"
#include "host/methods/lsh_sampling/lsh_weight.h"

namespace spillway {
namespace {

static_assert(kGroupMax <= 16, "a bit a query head");

}  // namespace

LshTail::LshTail(const ScoredKeys& keys, const ScorePass& scores)
    : keys_(keys),
      centre_(keys.context->index->centre.data() + int64_t{keys.kv_head} * keys.spec().head_dim) {
  const ModelSpec& spec = keys.spec();
  const MethodIndex& of_model = keys.model().IndexOf(kLshSamplingMethod);
  const auto& index = static_cast<const LshIndex&>(*of_model.index);
  const int group = spec.group();
  const int d = spec.head_dim;
  const int tables = spec.indices.lsh_table_count;
  std::vector<uint16_t> buckets(static_cast<size_t>(group) * tables);
  for (int g = 0; g < group; ++g) {
    const float* q = keys.queries->raw() + g * d;
    index.Buckets(keys.context->layer, q, buckets.data() + int64_t{g} * tables);
    double sum = 0;
    for (int i = 0; i < d; ++i) sum += double{q[i]} * q[i];
    query_norm_.push_back(std::sqrt(sum));
  }
  struct Taken {
    std::vector<uint32_t> tokens;
    std::vector<uint16_t> takers;
  };
  std::vector<Taken> of_block(scores.block_count());
  ParallelFor(int64_t{0}, scores.block_count(), [&](int64_t b) {
    const int64_t to = scores.block_end(b);
    for (int64_t page = scores.block_begin(b) / kPageTokenCount; page * kPageTokenCount < to;
         ++page) {
      const std::byte* names = keys.IndexPage(page) + of_model.offset_bytes;
      uint16_t takers[kPageTokenCount] = {};
      for (int g = 0; g < group; ++g) {
        uint16_t shared[kPageTokenCount];
        CountShared(buckets.data() + int64_t{g} * tables, tables, names, shared);
        for (int i = 0; i < kPageTokenCount; ++i) {
          takers[i] |= static_cast<uint16_t>((shared[i] >= kLshSharedMin) << g);
        }
      }
      const int64_t at = page * kPageTokenCount;
      const int64_t first = std::max(at, scores.block_begin(b));
      for (int64_t t = first; t < std::min(to, at + kPageTokenCount); ++t) {
        if (takers[t - at] == 0 || *scores.bins(t) == kHeavyBin) continue;
        of_block[b].tokens.push_back(static_cast<uint32_t>(t));
        of_block[b].takers.push_back(takers[t - at]);
      }
    }
  });
  for (const Taken& taken : of_block) {
    tokens_.insert(tokens_.end(), taken.tokens.begin(), taken.tokens.end());
    takers_.insert(takers_.end(), taken.takers.begin(), taken.takers.end());
  }
}

void LshTail::Weigh(int64_t first, int count, const std::byte* const* rows, float* logits) const {
  const ModelSpec& spec = keys_.spec();
  const KeyIndexSpec& indices = spec.indices;
  const int d = spec.head_dim;
  float key[kHeadDimMax];
  for (int i = 0; i < count; ++i) {
    ToFloat(spec.dtype, rows[i], d, key);
    double norm_sq = 0;
    for (int j = 0; j < d; ++j) {
      key[j] -= centre_[j];
      norm_sq += double{key[j]} * key[j];
    }
    for (int g = 0; g < spec.group(); ++g) {
      float& logit = logits[g * kRowBlock + i];
      if ((takers_[first + i] >> g & 1) == 0) {
        logit = kLshNotTaken;
        continue;
      }
      const float* q = keys_.queries->raw() + g * d;
      double dot = 0;
      for (int j = 0; j < d; ++j) dot += double{q[j]} * key[j];
      logit -= static_cast<float>(LshLogWeight(dot, query_norm_[g], std::sqrt(norm_sq),
                                               indices.lsh_bits, indices.lsh_table_count));
    }
  }
}

}  // namespace spillway

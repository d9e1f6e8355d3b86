#pragma once

#include "gpu/kernels/span_pages.cuh"

// Sums what codes predict of a span's rows (host/core/value_code.h), as products on tensor cores.
namespace spillway::cuda {

// A token that counts in predictions: its index among its page's factors, its stratum, and which of
// the warp's pages it is of.
struct CountedToken {
  int index, stratum, page;

  __device__ static uint16_t Pack(int index, int stratum, int page) {
    static_assert(kPageTokenCount == 128 && kStrataMax == 32);
    return static_cast<uint16_t>(index | stratum << 7 | page << 12);
  }
  __device__ static CountedToken Of(uint16_t packed) {
    return {packed & 127, packed >> 7 & 31, packed >> 12};
  }
};

// d += a b: a [16][8] and b [8][8] in tf32. Lane l has of a (row l / 4, column l % 4), the same of
// row + 8, then both of column + 4; of b (row l % 4, column l / 4) and the same of row + 4; of d
// (row l / 4, columns 2 (l % 4) and the next), then the same of row + 8.
__device__ inline void MultiplyTf32(float (&d)[4], const uint32_t (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(__float_as_uint(b0)),
        "r"(__float_as_uint(b1)));
}
// The part of x that tf32 holds; the rest is exact in fp32.
__device__ inline float Tf32Of(float x) {
  return __uint_as_float(__float_as_uint(x) & 0xFFFFE000u);
}

// Predictions of a warp's tokens: sums [strata][2 kHeads] = strata by tokens, times tokens by
// terms. The first matrix is 1 where the token is of the stratum. A quartet of heads has 8 columns:
// PredictedTerms::of_value of four heads, then of_centre. kHeads: 4, 8 or 16.
template <int kHeads>
class SpanPredictor {
 public:
  // weights: of the span, while they are levels. mass: SpanPages::MassMask().
  __device__ SpanPredictor(const AttendShape& shape, const UnitRequest& u, const SpanPages& pages,
                           int strata, const uint32_t* weights, const WeighedPages& weighed,
                           uint32_t mass)
      : shape_(shape),
        pages_(pages),
        weighed_(weighed),
        weights_(weights),
        tiles_((strata + 15) / 16),
        mass_(mass),
        square_of_factor_(static_cast<float>(shape.head_dim) *
                          SquareOfFactor(shape.tiling.value_bits)),
        distortion_(static_cast<float>(QuantiserDistortion(shape.tiling.value_bits))),
        inverse_unit_(1 / ValueUnit(u)) {
#pragma unroll
    for (int quartet = 0; quartet < kHeads / 4; ++quartet) {
      shrinkage_[quartet] = pages.shrinkage[min(HeadOf(quartet), shape.group - 1)];
    }
  }

  // Adds the warp's first `count` counted tokens. All lanes.
  __device__ void Add(int count) {
#pragma unroll 1
    for (int first = 0; first < count; first += 8) {
      const Token tokens[2] = {Load(first + lane_ % 4, count), Load(first + lane_ % 4 + 4, count)};
#pragma unroll
      for (int quartet = 0; quartet < kHeads / 4; ++quartet) {
        if (quartet * 4 >= shape_.group) break;
        const float terms[2] = {Term(tokens[0], quartet), Term(tokens[1], quartet)};
        const float high[2] = {Tf32Of(terms[0]), Tf32Of(terms[1])};
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          if (tile >= tiles_) break;
          const int row = tile * 16 + lane_ / 4;
          const uint32_t a[4] = {Is(tokens[0], row), Is(tokens[0], row + 8), Is(tokens[1], row),
                                 Is(tokens[1], row + 8)};
          MultiplyTf32(sums_[tile][quartet], a, high[0], high[1]);
          MultiplyTf32(sums_[tile][quartet], a, terms[0] - high[0], terms[1] - high[1]);
        }
      }
    }
  }

  // Stores the warp's sums: to [2][kStrataMax][G].
  __device__ void Store(float* to) const {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      if (tile >= tiles_) break;
#pragma unroll
      for (int quartet = 0; quartet < kHeads / 4; ++quartet) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int stratum = tile * 16 + e / 2 * 8 + lane_ / 4;
          const int column = lane_ % 4 * 2 + e % 2;
          const int head = quartet * 4 + column % 4;
          if (head >= shape_.group) continue;
          to[(column / 4 * kStrataMax + stratum) * shape_.group + head] = sums_[tile][quartet][e];
        }
      }
    }
  }

 private:
  struct Token {
    int stratum;    // -1: no token
    int levels_at;  // byte of head 0's level
    float factor_square;
    float value_square;
    float distortion;
  };

  // The lane's head and column.
  __device__ int HeadOf(int quartet) const { return quartet * 4 + lane_ / 4 % 4; }

  __device__ Token Load(int i, int count) const {
    const auto of = CountedToken::Of(weighed_.counted[min(i, count - 1)]);
    const int at = static_cast<int>(threadIdx.x) / 32 + of.page * kSpanParts;
    const float key_factor = BFloat16ToFloat(weighed_.key_factors[of.page][of.index]);
    const float in_units =
        BFloat16ToFloat(weighed_.value_factors[of.page][of.index]) * inverse_unit_;
    return {i < count ? of.stratum : -1, at * shape_.group * kWeightWords * 4 + of.index,
            fminf(key_factor * key_factor, kFactorSquareMax),
            in_units * in_units * square_of_factor_, (mass_ >> at & 1) != 0 ? distortion_ : 1.0f};
  }

  // The token's term in the lane's column.
  __device__ float Term(const Token& token, int quartet) const {
    const int head = HeadOf(quartet);
    if (token.stratum < 0 || head >= shape_.group) return 0;
    const auto* const levels = reinterpret_cast<const uint8_t*>(weights_);
    const uint8_t level = levels[token.levels_at + head * kWeightWords * 4];
    if (level == 0) return 0;
    const PredictedTerms terms = PredictTerms(
        pages_.weight_of_level[level], LogitVariance(token.factor_square, shrinkage_[quartet]),
        token.value_square, token.distortion);
    return fminf(lane_ < 16 ? terms.of_value : terms.of_centre, kFactorSquareMax);
  }

  // 1 in tf32 if the token is of the stratum, else 0.
  __device__ static uint32_t Is(const Token& token, int stratum) {
    return token.stratum == stratum ? 0x3F800000u : 0u;
  }

  const AttendShape& shape_;
  const SpanPages& pages_;
  const WeighedPages& weighed_;
  const uint32_t* const weights_;
  const int tiles_;
  const uint32_t mass_;
  const float square_of_factor_;
  const float distortion_;
  const float inverse_unit_;
  const int lane_ = threadIdx.x % 32;
  float shrinkage_[kHeads / 4];
  float sums_[2][kHeads / 4][4] = {};
};

}  // namespace spillway::cuda

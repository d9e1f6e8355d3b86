#pragma once

#include "gpu/kernels/span_predictor.cuh"
#include "host/core/rank_error.h"

// Weighs the tail's tokens of a coded unit (host/core/value_code.h): sums of x^ and integer
// weights.
namespace spillway::cuda {

__device__ inline uint8_t LevelOf(uint32_t levels, int octet) {
  return static_cast<uint8_t>(levels >> (8 * octet));
}

// Weighs a warp's pages. A lane has the four tokens of row lane % 8 of tile lane / 8.
class PageWeigher {
 public:
  // weights: of the span, still levels. mass: SpanPages::MassMask().
  __device__ PageWeigher(const AttendShape& shape, const UnitRequest& u, const TailBins& tail,
                         uint32_t* weights, WeighedPages& weighed, SpanPages& pages, uint32_t mass)
      : shape_(shape),
        u_(u),
        tail_(tail),
        weights_(weights),
        weighed_(weighed),
        pages_(pages),
        mass_(mass),
        reference_(ReferencePages::Of(u.begin, u.end)) {}

  // Sets to 0 the levels of tokens that are not in the tail, and lists those that count in
  // predictions. Returns their number.
  __device__ int FindTail() {
    int count = 0;
    for (int j = 0; j < kWeighedPages && PageOf(j) < pages_.place.count; ++j) {
      const int64_t page = pages_.place.page(PageOf(j));
      const int64_t first = page * kPageTokenCount + lane_ / 8 * kCodeTileTokens + lane_ % 8;
      const bool all = IsReference(page);
      uint32_t mask = 0;  // 0xFF in the bytes of tokens of the tail
#pragma unroll
      for (int o = 0; o < 4; ++o) {
        const int bin = weighed_.bins[j][lane_ / 8 * kCodeTileTokens + lane_ % 8 + 8 * o];
        const int stratum = tail_.StratumOf(bin, first + 8 * o);
        if (stratum >= 0) mask |= 0xFFu << (8 * o);
        const bool counts = stratum >= 0 && (all || stratum < tail_.near);
        const unsigned found = __ballot_sync(kFullWarp, counts);
        if (counts) {
          weighed_.counted[count + __popc(found & ((1u << lane_) - 1))] =
              CountedToken::Pack(4 * lane_ + o, stratum, j);
          atomicAdd(&pages_.counted[stratum], 1u);
        }
        count += __popc(found);
      }
      uint32_t* const levels = weights_ + PageOf(j) * shape_.group * kWeightWords + lane_;
      for (int g = 0; g < shape_.group; ++g) levels[g * kWeightWords] &= mask;
    }
    __syncwarp();
    return count;
  }

  // Sets sums, largest products and integer weights. REQUIRES: FindTail().
  __device__ void Weigh() {
    for (int j = 0; j < kWeighedPages && PageOf(j) < pages_.place.count; ++j) {
      const auto two = reinterpret_cast<const uint2*>(weighed_.value_factors[j])[lane_];
      const float factors[4] = {BFloat16ToFloat(static_cast<uint16_t>(two.x)),
                                BFloat16ToFloat(static_cast<uint16_t>(two.x >> 16)),
                                BFloat16ToFloat(static_cast<uint16_t>(two.y)),
                                BFloat16ToFloat(static_cast<uint16_t>(two.y >> 16))};
      for (int quartet = 0; quartet * 4 < shape_.group; ++quartet) {
        WeighQuartet(PageOf(j), quartet, factors);
      }
    }
  }

 private:
  __device__ int PageOf(int j) const { return static_cast<int>(threadIdx.x) / 32 + j * kSpanParts; }

  __device__ void WeighQuartet(int at, int quartet, const float (&factors)[4]) {
    const bool has_mass = (mass_ >> at & 1) != 0;
    uint32_t* const own = weights_ + (at * shape_.group + quartet * 4) * kWeightWords + lane_;
    const int heads = min(shape_.group - quartet * 4, 4);
    float products[4][4], sums[4], largest[4];
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      const uint32_t levels = h < heads ? own[h * kWeightWords] : 0;
      sums[h] = largest[h] = 0;
#pragma unroll
      for (int o = 0; o < 4; ++o) {
        const float weight = LevelWeight(LevelOf(levels, o));
        products[h][o] = weight * factors[o];
        sums[h] += weight;
        largest[h] = fmaxf(largest[h], products[h][o]);
      }
    }
    // Lane l gets those of head l / 8.
    const float sum = ReduceByLane(sums, [](float a, float b) { return a + b; });
    const float most =
        has_mass ? ReduceByLane(largest, [](float a, float b) { return fmaxf(a, b); }) : 0.0f;
    const int head = quartet * 4 + lane_ / 8;
    if (lane_ % 8 == 0 && head < shape_.group) {
      pages_.sums[at][head] = sum;
      pages_.largest[at][head] = most;
      u_.codes.largest[pages_.place.page(at) * shape_.group + head] = most;
    }
    if (!has_mass) return;
    const float inverse_of_lane = CodeWeightInverse(most);
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      const float inverse = __shfl_sync(kFullWarp, inverse_of_lane, 8 * h);
      if (h >= heads) break;
      uint32_t packed = 0;
#pragma unroll
      for (int o = 0; o < 4; ++o) {
        packed |= static_cast<uint32_t>(CodeWeight(products[h][o], inverse)) << (8 * o);
      }
      own[h * kWeightWords] = packed;
      const int total =
          __reduce_add_sync(kFullWarp, __dp4a(static_cast<int>(packed), 0x01010101, 0));
      if (lane_ == 0) pages_.weight_sums[at][quartet * 4 + h] = total;
    }
  }

  __device__ bool IsReference(int64_t page) const {
    const int64_t from = page - reference_.first;
    return from >= 0 && from % reference_.step == 0 && from / reference_.step < reference_.count;
  }

  const AttendShape& shape_;
  const UnitRequest& u_;
  const TailBins& tail_;
  uint32_t* const weights_;
  WeighedPages& weighed_;
  SpanPages& pages_;
  const uint32_t mass_;
  const ReferencePages reference_;
  const int lane_ = threadIdx.x % 32;
};

}  // namespace spillway::cuda

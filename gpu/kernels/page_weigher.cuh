#pragma once

#include "gpu/kernels/span_predictor.cuh"
#include "host/core/rank_error.h"

// Weighs the tail's tokens of a coded unit (host/core/value_code.h): sums of x^ and integer
// weights.
namespace spillway::cuda {

// Weighs a warp's pages. A lane has the four tokens of row lane % 8 of tile lane / 8. Loops over
// pages and heads are not unrolled: that is less code, and as fast.
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
#pragma unroll 1
    for (int j = 0; j < kWeighedPages && PageOf(j) < pages_.place.count; ++j) {
      const int64_t page = pages_.place.page(PageOf(j));
      const int own = lane_ / 8 * kCodeTileTokens + lane_ % 8;
      const bool all = IsReference(page);
      uint32_t mask = 0;  // 0xFF in the bytes of tokens of the tail
#pragma unroll
      for (int o = 0; o < 4; ++o) {
        const int stratum =
            tail_.StratumOf(weighed_.bins[j][own + 8 * o], page * kPageTokenCount + own + 8 * o);
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
#pragma unroll 1
      for (int g = 0; g < shape_.group; ++g) levels[g * kWeightWords] &= mask;
    }
    __syncwarp();
    return count;
  }

  // Sets sums, largest products and integer weights. REQUIRES: FindTail().
  __device__ void Weigh() {
#pragma unroll 1
    for (int j = 0; j < kWeighedPages && PageOf(j) < pages_.place.count; ++j) {
      const float4 four = LoadFour(
          DType::kBF16, reinterpret_cast<const std::byte*>(weighed_.value_factors[j]), lane_);
      const float factors[4] = {four.x, four.y, four.z, four.w};
#pragma unroll 1
      for (int g = 0; g < shape_.group; g += 2) {
        WeighHead(PageOf(j), g, factors);
        if (g + 1 < shape_.group) WeighHead(PageOf(j), g + 1, factors);
      }
    }
  }

 private:
  __device__ int PageOf(int j) const { return static_cast<int>(threadIdx.x) / 32 + j * kSpanParts; }

  __device__ void WeighHead(int at, int g, const float (&factors)[4]) {
    uint32_t& own = weights_[(at * shape_.group + g) * kWeightWords + lane_];
    const uint32_t levels = own;
    float products[4], sum = 0, largest = 0;
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      const float weight = pages_.weight_of_level[levels >> (8 * o) & 0xFF];
      products[o] = weight * factors[o];
      sum += weight;
      largest = fmaxf(largest, products[o]);
    }
    sum = WarpSum(sum);
    const bool has_mass = (mass_ >> at & 1) != 0;
    // Floats that are not negative are in the order of their bits.
    const float most =
        has_mass ? __uint_as_float(__reduce_max_sync(kFullWarp, __float_as_uint(largest))) : 0.0f;
    int total = 0;
    if (has_mass) {
      const float inverse = CodeWeightInverse(most);
      uint32_t packed = 0;
#pragma unroll
      for (int o = 0; o < 4; ++o) {
        packed |= static_cast<uint32_t>(CodeWeight(products[o], inverse)) << (8 * o);
      }
      own = packed;
      total = __reduce_add_sync(kFullWarp, __dp4a(static_cast<int>(packed), 0x01010101, 0));
    }
    if (lane_ != 0) return;
    pages_.sums[at][g] = sum;
    pages_.largest[at][g] = most;
    pages_.weight_sums[at][g] = total;
    u_.codes.largest[pages_.place.page(at) * shape_.group + g] = most;
  }

  __device__ bool IsReference(int64_t page) const {
    const auto from = static_cast<int32_t>(page - reference_.first);
    const auto step = static_cast<int32_t>(reference_.step);
    return from % step == 0 && from / step < static_cast<int32_t>(reference_.count);
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

#pragma once

#include "gpu/kernels/span_pages.cuh"
#include "host/core/rank_error.h"
#include "host/core/value_code.h"

// Weighs the tail's tokens of a coded unit (host/core/value_code.h): sums of x^, integer weights,
// and what codes predict of the rows.
namespace spillway::cuda {

// Where the unit's tail is in its bins.
struct TailBins {
  const uint8_t* class_of_bin;  // in shared memory, indexed by BinIndex()
  int bin_count;
  int tie_class;
  int64_t heavy_from;
  int near;  // strata whose tokens all count in predictions: the first ones

  // The stratum of a token, or -1: it is not in the tail.
  __device__ int StratumOf(int bin, int64_t token) const {
    int c = class_of_bin[BinIndex(bin, bin_count)];
    if (c == kClassTie && token < heavy_from) c = tie_class;
    return c < kTailStrataMax ? c : -1;
  }
};

// The four tokens of a page that a lane has: those of row lane % 8 of tile lane / 8.
struct OwnSlots {
  int64_t first;  // token of octet 0
  int stratum[4];

  __device__ OwnSlots(const UnitRequest& u, const TailBins& tail, int64_t page, int lane)
      : first(page * kPageTokenCount + lane / 8 * kCodeTileTokens + lane % 8) {
    uint16_t bins[4];
#pragma unroll
    for (int o = 0; o < 4; ++o) bins[o] = u.bins[first + 8 * o];
#pragma unroll
    for (int o = 0; o < 4; ++o) stratum[o] = tail.StratumOf(bins[o], first + 8 * o);
  }
  // 0xFF in the bytes of tokens of the tail.
  __device__ uint32_t TailMask() const {
    uint32_t mask = 0;
#pragma unroll
    for (int o = 0; o < 4; ++o) mask |= stratum[o] >= 0 ? 0xFFu << (8 * o) : 0u;
    return mask;
  }
};

__device__ inline uint8_t LevelOf(uint32_t levels, int octet) {
  return static_cast<uint8_t>(levels >> (8 * octet));
}

// Weighs the pages of a part of a span: one warp.
class PageWeigher {
 public:
  // shrinkage [G]: LevelShrinkage(). predicted [strata][G]: of the warp, zeros. weights: of the
  // span. All in shared memory.
  __device__ PageWeigher(const AttendShape& shape, const UnitRequest& u, const TailBins& tail,
                         const float* shrinkage, PredictedPart* predicted, uint32_t* weights,
                         SpanPages& pages)
      : shape_(shape),
        u_(u),
        tail_(tail),
        shrinkage_(shrinkage),
        predicted_(predicted),
        weights_(weights),
        pages_(pages),
        reference_(ReferencePages::Of(u.begin, u.end)),
        square_of_factor_(static_cast<float>(shape.head_dim) *
                          SquareOfFactor(shape.tiling.value_bits)),
        distortion_(static_cast<float>(QuantiserDistortion(shape.tiling.value_bits))),
        inverse_unit_(1 / ValueUnit(u)) {}

  // at: the page's place in the span.
  __device__ void Weigh(int64_t page, int at) {
    const std::byte* const codes = pages_.codes[at];
    const OwnSlots own(u_, tail_, page, lane_);
    const uint32_t mask = own.TailMask();
    const float4 four =
        LoadFour(DType::kBF16, codes + shape_.tiling.value_factor_offset_bytes(), lane_);
    const float factors[4] = {four.x, four.y, four.z, four.w};
    for (int quartet = 0; quartet * 4 < shape_.group; ++quartet) {
      uint32_t levels[4];
      LoadLevels(page, quartet, mask, levels);
      WeighQuartet(page, at, quartet, levels, factors);
    }
    Predict(page, at, own);
  }

 private:
  // The levels of a quartet's heads, 0 for heads beyond the group. Those of tokens outside the tail
  // become 0, also in memory.
  __device__ void LoadLevels(int64_t page, int quartet, uint32_t mask, uint32_t (&levels)[4]) {
    auto* const at = reinterpret_cast<uint32_t*>(
        u_.codes.levels + (page * shape_.group + quartet * 4) * kPageTokenCount);
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      levels[h] = quartet * 4 + h < shape_.group ? at[h * kPageRows + lane_] : 0;
    }
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      if ((levels[h] & ~mask) == 0) continue;
      levels[h] &= mask;
      at[h * kPageRows + lane_] = levels[h];
    }
  }

  // Sets sums, largest products and integer weights of a quartet's heads.
  __device__ void WeighQuartet(int64_t page, int at, int quartet, const uint32_t (&levels)[4],
                               const float (&factors)[4]) {
    const bool has_mass = pages_.has_mass[at];
    float products[4][4], sums[4], largest[4];
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      sums[h] = largest[h] = 0;
#pragma unroll
      for (int o = 0; o < 4; ++o) {
        const float weight = LevelWeight(LevelOf(levels[h], o));
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
      u_.codes.largest[page * shape_.group + head] = most;
    }
    if (!has_mass) return;
    const float inverse_of_lane = CodeWeightInverse(most);
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      const float inverse = __shfl_sync(kFullWarp, inverse_of_lane, 8 * h);
      if (quartet * 4 + h >= shape_.group) break;
      uint32_t packed = 0;
#pragma unroll
      for (int o = 0; o < 4; ++o) {
        packed |= static_cast<uint32_t>(CodeWeight(products[h][o], inverse)) << (8 * o);
      }
      weights_[(at * shape_.group + quartet * 4 + h) * kWeightWords + lane_] = packed;
      const int own = __dp4a(static_cast<int>(packed), 0x01010101, 0);
      const int total = __reduce_add_sync(kFullWarp, own);
      if (lane_ == 0) pages_.weight_sums[at][quartet * 4 + h] = total;
    }
  }

  __device__ bool IsReference(int64_t page) const {
    const int64_t from = page - reference_.first;
    return from >= 0 && from % reference_.step == 0 && from / reference_.step < reference_.count;
  }

  // Adds the page's tokens that count to the predictions, one a lane, stratum by stratum.
  __device__ void Predict(int64_t page, int at, const OwnSlots& own) {
    const bool all = IsReference(page);
    uint16_t* const counted = pages_.counted[threadIdx.x / 32];
    const unsigned lower = (1u << lane_) - 1;
    int count = 0;
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      const int stratum = own.stratum[o];
      const bool counts = stratum >= 0 && (all || stratum < tail_.near);
      const unsigned found = __ballot_sync(kFullWarp, counts);
      if (counts) {
        counted[count + __popc(found & lower)] =
            static_cast<uint16_t>(4 * lane_ + o | stratum << 8);
      }
      count += __popc(found);
    }
    __syncwarp();
    for (int first = 0; first < count; first += 32) {
      const bool there = first + lane_ < count;
      const int packed = counted[min(first + lane_, count - 1)];
      PredictTokens(page, at, packed & 0xFF, there ? packed >> 8 : kNoStratum);
    }
    __syncwarp();  // before the list is written again
  }

  // index: of the lane's token among the page's factors.
  __device__ void PredictTokens(int64_t page, int at, int index, int stratum) {
    const std::byte* const codes = pages_.codes[at];
    const auto factor_at = [&](int offset) {
      return BFloat16ToFloat(reinterpret_cast<const uint16_t*>(codes + offset)[index]);
    };
    const float key_factor = factor_at(shape_.tiling.factor_offset_bytes());
    const float factor_square = fminf(key_factor * key_factor, kFactorSquareMax);
    const float in_units = factor_at(shape_.tiling.value_factor_offset_bytes()) * inverse_unit_;
    const float value_square = in_units * in_units * square_of_factor_;
    const float distortion = pages_.has_mass[at] ? distortion_ : 1.0f;
    for (int quartet = 0; quartet * 4 < shape_.group; ++quartet) {
      float of_value[4], of_centre[4];
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        const int g = min(quartet * 4 + h, shape_.group - 1);
        const uint8_t level = u_.codes.levels[(page * shape_.group + g) * kPageTokenCount + index];
        PredictedTerms terms = {0, 0};
        if (level != 0) {
          terms = PredictTerms(LevelWeight(level), LogitVariance(factor_square, shrinkage_[g]),
                               value_square, distortion);
        }
        of_value[h] = terms.of_value;
        of_centre[h] = terms.of_centre;
      }
      AddTerms(quartet, stratum, of_value, of_centre);
    }
  }

  // Adds the lanes' terms to the warp's predictions.
  __device__ void AddTerms(int quartet, int stratum, const float (&of_value)[4],
                           const float (&of_centre)[4]) {
    for (int last = -1;;) {
      const int next = __reduce_min_sync(kFullWarp, stratum > last ? stratum : kNoStratum);
      if (next == kNoStratum) break;
      const bool member = stratum == next;
      const auto count = static_cast<uint32_t>(__popc(__ballot_sync(kFullWarp, member)));
      float sums[8];
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        sums[h] = member ? of_value[h] : 0.0f;
        sums[4 + h] = member ? of_centre[h] : 0.0f;
      }
      const float sum = ReduceByLane(sums, [](float a, float b) { return a + b; });
      const int of_lane = lane_ / 4;  // among the sums
      const int head = quartet * 4 + of_lane % 4;
      if (lane_ % 4 == 0 && head < shape_.group) {
        PredictedPart& part = predicted_[next * shape_.group + head];
        if (of_lane < 4) {
          part.of_value += sum;
          part.count += count;
        } else {
          part.of_centre += sum;
        }
      }
      last = next;
    }
  }

  static constexpr int kNoStratum = INT32_MAX;

  const AttendShape& shape_;
  const UnitRequest& u_;
  const TailBins& tail_;
  const float* const shrinkage_;
  PredictedPart* const predicted_;
  uint32_t* const weights_;
  SpanPages& pages_;
  const ReferencePages reference_;
  const float square_of_factor_;
  const float distortion_;
  const float inverse_unit_;
  const int lane_ = threadIdx.x % 32;
};

}  // namespace spillway::cuda

#pragma once

#include "gpu/kernels/span_pages.cuh"
#include "host/core/value_code.h"

// Sums codes of values, as products of integers on tensor cores.
namespace spillway::cuda {

// d += a b: a [16][32] and b [32][8], 8 bits each. Lane l has of a row l / 4, four elements from
// 4 (l % 4) on, the same of row + 8, then both from element 16 on; of b the same of column l / 4;
// of d (row l / 4, columns 2 (l % 4) and the next), then the same of row + 8.
__device__ inline void MultiplyBytes(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                     uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Sums the codes of a warp's pages over kSummedDims dimensions of a part. The span's pages that
// have mass are those of warps 0, 1, ... in turn. kWidth: bits of a field. kHeads: 8 or 16. Codes
// are the rows of a matrix, dimensions by tokens, and weights the columns of another, tokens by
// heads.
template <int kWidth, int kHeads>
class CodeSummer {
 public:
  static constexpr int kFields = 8 / kWidth;
  static constexpr int kRunWords = kSummedDims / kFields;
  static constexpr int kWordTiles = kRunWords / 16;
  static constexpr int kHeadTiles = (kHeads + 7) / 8;

  // part: of the codes. first_word: of the part's words. weights: of the span. stages: of the warp.
  // mass: SpanPages::MassMask().
  __device__ CodeSummer(const AttendShape& shape, const UnitRequest& u, const SpanPages& pages,
                        int part, int first_word, const uint32_t* weights, uint32_t* stages,
                        uint32_t mass)
      : shape_(shape),
        pages_(pages),
        weights_(weights),
        stages_(stages),
        words_(shape.tiling.value_words(part)),
        row_words_(shape.tiling.value_row_words()),
        first_word_(first_word),
        codes_at_(shape.tiling.value_code_offset_bytes() / 4 +
                  (part == 1 ? shape.tiling.value_words(0) : 0) + first_word),
        below_(part == 1 ? 2 : 0),
        middle_(part == 1 ? 0 : (1 << shape.tiling.value_bits) - 1),
        inverse_unit_(1 / ValueUnit(u)) {
    const bool has_mass = (mass >> lane_ & 1) != 0;
    const int before = __popc(mass & ((1u << lane_) - 1));
    own_ = __ballot_sync(kFullWarp,
                         has_mass && before % kSpanParts == static_cast<int>(threadIdx.x) / 32);
  }

  // Adds all of the warp's pages.
  __device__ void AddAll() {
    int at = -1;  // the page that is on its way
#pragma unroll 1
    for (int stage = 0;; stage ^= 1) {
      const int next = Next();
      if (next >= 0) Bring(next, stage);
      asm volatile("cp.async.commit_group;" ::: "memory");
      if (at >= 0) {
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncwarp();
        Add(at, stages_ + (stage ^ 1) * kStageWords);
        __syncwarp();
      }
      if (next < 0) break;
      at = next;
    }
  }

  // Stores the warp's sums: to [G][kSummedDims], by SumAt().
  __device__ void Store(float* to) const {
#pragma unroll
    for (int j = 0; j < kWordTiles; ++j) {
#pragma unroll
      for (int p = 0; p < kFields; ++p) {
#pragma unroll
        for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int word = j * 16 + e / 2 * 8 + lane_ / 4;
            const int head = n * 8 + lane_ % 4 * 2 + e % 2;
            if (head < shape_.group) to[SumAt(head, p * kRunWords + word)] = sums_[j][p][n][e];
          }
        }
      }
    }
  }
  // i: field times kRunWords + word. Heads that lanes store together are in other banks.
  __device__ static int SumAt(int head, int i) {
    return head * kSummedDims + (i ^ (head / 2 % 4 * 8));
  }

 private:
  // Takes the warp's next page; -1 if there is none.
  __device__ int Next() {
    const int at = __ffs(static_cast<int>(own_)) - 1;
    own_ &= own_ - 1;
    return at;
  }

  // Where a word of a row is: rows that lanes read together are in other banks.
  __device__ static int WordAt(int row, int word) {
    return row * kRunWords + (word ^ (row * 8 & (kRunWords - 8)));
  }

  // Starts to copy a page.
  __device__ void Bring(int at, int stage) {
    const auto* const codes = reinterpret_cast<const uint32_t*>(pages_.codes[at]) + codes_at_;
    const int words = min(kRunWords, words_ - first_word_);
    uint32_t* const to = stages_ + stage * kStageWords;
    if (row_words_ % 4 == 0 && words % 4 == 0 && codes_at_ % 4 == 0) {
      BringRows<16>(to, codes, words);
    } else {
      BringRows<8>(to, codes, words);
    }
  }
  template <int kBytes>
  __device__ void BringRows(uint32_t* to, const uint32_t* codes, int words) {
    constexpr int kChunkWords = kBytes / 4;
    constexpr int kChunks = kRunWords / kChunkWords;  // of a row
#pragma unroll 1
    for (int i = lane_; i < kPageRows * kChunks; i += 32) {
      const int row = i / kChunks;
      const int word = i % kChunks * kChunkWords;
      if (word < words) CopyAhead<kBytes>(to + WordAt(row, word), codes + row * row_words_ + word);
    }
  }

  __device__ void Add(int at, const uint32_t* codes) {
    int32_t products[kWordTiles][kFields][kHeadTiles][4] = {};
    const int column = lane_ / 4;
    const uint32_t* const weights = weights_ + at * shape_.group * kWeightWords;
#pragma unroll 1
    for (int tile = 0; tile < kCodeTilesPerPage; ++tile) {
      const int row = tile * 8 + lane_ % 4;
      uint32_t b[kHeadTiles][2];
#pragma unroll
      for (int n = 0; n < kHeadTiles; ++n) {
        const int head = n * 8 + column;
        const bool present = head < shape_.group;
        b[n][0] = present ? weights[head * kWeightWords + row] : 0;
        b[n][1] = present ? weights[head * kWeightWords + row + 4] : 0;
      }
#pragma unroll
      for (int j = 0; j < kWordTiles; ++j) {
        // What is beyond the part's words is not stored.
        const int word = j * 16 + column;
        const uint32_t w[4] = {codes[WordAt(row, word)], codes[WordAt(row, word + 8)],
                               codes[WordAt(row + 4, word)], codes[WordAt(row + 4, word + 8)]};
#pragma unroll
        for (int p = 0; p < kFields; ++p) {
          constexpr uint32_t kMask = ((1u << kWidth) - 1) * 0x01010101u;
          const uint32_t a[4] = {w[0] >> (kWidth * p) & kMask, w[1] >> (kWidth * p) & kMask,
                                 w[2] >> (kWidth * p) & kMask, w[3] >> (kWidth * p) & kMask};
#pragma unroll
          for (int n = 0; n < kHeadTiles; ++n) {
            MultiplyBytes(products[j][p][n], a, b[n][0], b[n][1]);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int head = n * 8 + lane_ % 4 * 2 + c;
        if (head >= shape_.group) continue;
        const float unit = CodeWeightUnit(pages_.largest[at][head]) * 0.5f * inverse_unit_;
        const int32_t offset = middle_ * pages_.weight_sums[at][head];
#pragma unroll
        for (int j = 0; j < kWordTiles; ++j) {
#pragma unroll
          for (int p = 0; p < kFields; ++p) {
#pragma unroll
            for (int e = c; e < 4; e += 2) {
              const int32_t twice = (products[j][p][n][e] << (1 + below_)) - offset;
              sums_[j][p][n][e] = fmaf(static_cast<float>(twice), unit, sums_[j][p][n][e]);
            }
          }
        }
      }
    }
  }

  const AttendShape& shape_;
  const SpanPages& pages_;
  const uint32_t* const weights_;
  uint32_t* const stages_;
  const int words_;
  const int row_words_;
  const int first_word_;
  const int codes_at_;
  const int below_;
  const int middle_;
  const float inverse_unit_;
  const int lane_ = threadIdx.x % 32;
  uint32_t own_;  // one bit for each page that the warp has not taken yet
  float sums_[kWordTiles][kFields][kHeadTiles][4] = {};
};

}  // namespace spillway::cuda

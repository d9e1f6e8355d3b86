#pragma once

#include "gpu/kernels/page_keys.cuh"

// The norm bytes of a page's rows: how far each value is from the usual one.
namespace spillway::cuda {

// Threads that share a value, one piece each at a time; and values per thread.
inline constexpr int kValueThreads = 16;
inline constexpr int kThreadValues = kPageTokenCount * kValueThreads / kPageThreads;

// Approximate squared distances of a page's values from their centre, in units of value_unit. Only
// a byte of the logarithm is needed, so a sum in any order nearly always determines it.
class RoughDistances {
 public:
  // Starts to load the first pieces.
  __device__ RoughDistances(const EncodeWork& work, const std::byte* rows)
      : values_(rows + work.row_bytes / 2 + threadIdx.x / kValueThreads * work.row_bytes),
        pieces_(work.head_dim / PieceElements(work.dtype)) {
    Load(work, threadIdx.x % kValueThreads);
  }

  // Fills square [128]; for the error of their roots see kErrorMax. centre: [d]. Ends without a
  // barrier.
  __device__ void Sum(const EncodeWork& work, const float* centre, float unit, float* square) {
    const float inverse = 1.0f / unit;
    float sum[kThreadValues] = {};
    for (int piece = threadIdx.x % kValueThreads;; piece += kValueThreads) {
      if (piece < pieces_) Add(work.dtype, centre, piece, inverse, sum);
      if (piece + kValueThreads >= pieces_) break;
      Load(work, piece + kValueThreads);
    }
#pragma unroll
    for (int n = 0; n < kThreadValues; ++n) {
#pragma unroll
      for (int apart = kValueThreads / 2; apart > 0; apart /= 2) {
        sum[n] += __shfl_xor_sync(kFullWarp, sum[n], apart);
      }
      if (threadIdx.x % kValueThreads == 0) {
        square[n * (kPageThreads / kValueThreads) + threadIdx.x / kValueThreads] = sum[n];
      }
    }
  }

 private:
  __device__ void Load(const EncodeWork& work, int piece) {
#pragma unroll
    for (int n = 0; n < kThreadValues; ++n) {
      if (piece >= pieces_) break;
      const std::byte* value = values_ + n * (kPageThreads / kValueThreads) * work.row_bytes;
      raw_[n] = __ldcs(reinterpret_cast<const uint4*>(value) + piece);
    }
  }
  __device__ void Add(DType dtype, const float* centre, int piece, float inverse,
                      float (&sum)[kThreadValues]) const {
    const auto scaled = [&](int four) {
      const float4 c = reinterpret_cast<const float4*>(centre)[four];
      return make_float4(c.x * inverse, c.y * inverse, c.z * inverse, c.w * inverse);
    };
    const auto add = [&](float4 v, float4 c, float& to) {
      const float x = fmaf(v.x, inverse, -c.x);
      const float y = fmaf(v.y, inverse, -c.y);
      const float z = fmaf(v.z, inverse, -c.z);
      const float w = fmaf(v.w, inverse, -c.w);
      to = fmaf(w, w, fmaf(z, z, fmaf(y, y, fmaf(x, x, to))));
    };
    if (dtype == DType::kF32) {
      const float4 c = scaled(piece);
#pragma unroll
      for (int n = 0; n < kThreadValues; ++n) {
        add(make_float4(__uint_as_float(raw_[n].x), __uint_as_float(raw_[n].y),
                        __uint_as_float(raw_[n].z), __uint_as_float(raw_[n].w)),
            c, sum[n]);
      }
      return;
    }
    const float4 low = scaled(2 * piece);
    const float4 high = scaled(2 * piece + 1);
#pragma unroll
    for (int n = 0; n < kThreadValues; ++n) {
      add(WidenFour(dtype, raw_[n].x, raw_[n].y), low, sum[n]);
      add(WidenFour(dtype, raw_[n].z, raw_[n].w), high, sum[n]);
    }
  }

  const std::byte* values_;  // first value of the thread
  int pieces_;               // per value
  uint4 raw_[kThreadValues];
};

// A row's norm byte from its approximate squared distance; false if that does not determine it. A
// sum of up to 256 squares has a relative error below 2^-17, and so has the sum in the fixed order.
__device__ inline bool RoughNorm(const HeadStatistics& head, float square, uint8_t& norm) {
  constexpr float kErrorMax = 0x1p-16f;
  constexpr float kSmall = 0x1p-100f;
  // Outside these ranges, distances in fp32 may have few valid bits, or none.
  if (!(square < 0x1p80f)) return false;
  if (!(head.value_reference > kSmall && head.value_reference < 1 / kSmall)) return false;
  const float ratio = __fsqrt_rn(square) * (head.value_unit / head.value_reference);
  norm = NormByte(false, ValueExponent(ratio * (1 - kErrorMax), 1.0f));
  return norm == NormByte(false, ValueExponent(ratio * (1 + kErrorMax), 1.0f));
}

// Stores the page's norm bytes; threads [0, 128), one row each. square: from RoughDistances::Sum();
// radius [128]: of the keys; uneven: IsUneven(radius).
__device__ inline void StoreNorms(const EncodeWork& work, const HeadStatistics& head,
                                  const float* value_centre, const std::byte* rows,
                                  const float* square, const float* radius, bool uneven,
                                  std::byte* page) {
  const int token = threadIdx.x;
  // Only an uneven page has keys far enough away to be strays.
  const bool stray = uneven && IsStray(radius[token], MedianRadius(radius), head.median_radius);
  uint8_t norm = kStrayNorm;
  const bool known = stray || RoughNorm(head, square[token], norm);
  // Exact distances for the other rows, by the whole warp one after the other.
  for (unsigned left = __ballot_sync(kFullWarp, !known); left != 0; left &= left - 1) {
    const int lane = __ffs(left) - 1;
    const std::byte* row = rows + (token / 32 * 32 + lane) * work.row_bytes;
    const float distance =
        WarpRadius(work.dtype, row + work.row_bytes / 2, value_centre, work.head_dim);
    if (token % 32 == lane) {
      norm = NormByte(false, ValueExponent(distance, head.value_reference));
    }
  }
  NormAt(work.tiling, page, token) = norm;
}

}  // namespace spillway::cuda

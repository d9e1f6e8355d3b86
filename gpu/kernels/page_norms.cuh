#pragma once

#include "gpu/kernels/page_keys.cuh"

// The norm bytes of a page's rows: how far each value is from the usual one.
namespace spillway::cuda {

// Threads that share a value, one piece each at a time; and values per thread: those of a run,
// whose mean the thread computes.
inline constexpr int kValueThreads = 16;
inline constexpr int kThreadValues = kPageTokenCount * kValueThreads / kPageThreads;
static_assert(kThreadValues == kValueRunTokens);
// Floats of the means that a block computes at a time: of kValueThreads pieces.
inline constexpr int kValueMeansFloats = kValueRunCount * kValueThreads * 8;

// The median of kCount numbers `stride` apart.
template <int kCount>
__device__ inline float MedianOf(const float* numbers, int stride) {
  float x[kCount];
#pragma unroll
  for (int b = 0; b < kCount; ++b) x[b] = numbers[b * stride];
  float median = 0;
#pragma unroll
  for (int b = 0; b < kCount; ++b) {
    int below = 0;
#pragma unroll
    for (int other = 0; other < kCount; ++other) {
      below += other < b ? x[other] <= x[b] : x[other] < x[b];
    }
    if (below == kCount / 2) median = x[b];
  }
  return median;
}

// The value centre of a page, and approximate squared distances of its values from it, in units of
// value_unit. Only a byte of the logarithm is needed, so a sum in any order nearly always
// determines it.
class PageValues {
 public:
  // Starts to load the first pieces.
  __device__ PageValues(const EncodeWork& work, const std::byte* rows)
      : rows_(rows + threadIdx.x / kValueThreads * kThreadValues * work.row_bytes),
        pieces_(work.head_dim / PieceElements(work.dtype)) {
    Load(work, threadIdx.x % kValueThreads);
  }

  // Fills centre [d] and square [128]; for the error of their roots see kErrorMax. means:
  // [kValueMeansFloats], in shared memory like both. All threads of the block; ends without a
  // barrier.
  __device__ void Measure(const EncodeWork& work, float unit, float* means, float* centre,
                          float* square) {
    const float inverse = 1.0f / unit;
    const int elements = PieceElements(work.dtype);
    const int dims = kValueThreads * elements;  // at a time
    float sum[kThreadValues] = {};
    for (int first = 0; first < pieces_; first += kValueThreads) {
      const int piece = first + static_cast<int>(threadIdx.x) % kValueThreads;
      if (first > 0) Load(work, piece);
      if (piece < pieces_) StoreMeans(work.dtype, means, dims);
      __syncthreads();
      const int i = static_cast<int>(threadIdx.x);
      if (i < dims && first * elements + i < work.head_dim) {
        centre[first * elements + i] = MedianOf<kValueRunCount>(means + i, dims);
      }
      __syncthreads();
      if (piece < pieces_) Add(work.dtype, centre, piece, inverse, sum);
    }
#pragma unroll
    for (int n = 0; n < kThreadValues; ++n) {
#pragma unroll
      for (int apart = kValueThreads / 2; apart > 0; apart /= 2) {
        sum[n] += __shfl_xor_sync(kFullWarp, sum[n], apart);
      }
      if (threadIdx.x % kValueThreads == 0) {
        square[threadIdx.x / kValueThreads * kThreadValues + n] = sum[n];
      }
    }
  }

 private:
  // Stores the thread's part of the means [kValueRunCount][dims].
  __device__ void StoreMeans(DType dtype, float* means, int dims) const {
    double sum[8] = {};
    const auto add = [&](float4 v, double* to) {
      to[0] += v.x;
      to[1] += v.y;
      to[2] += v.z;
      to[3] += v.w;
    };
    const auto mean = [&](const double* of) {
      return make_float4(
          static_cast<float>(of[0] / kValueRunTokens), static_cast<float>(of[1] / kValueRunTokens),
          static_cast<float>(of[2] / kValueRunTokens), static_cast<float>(of[3] / kValueRunTokens));
    };
    auto* const to = reinterpret_cast<float4*>(means + threadIdx.x / kValueThreads * dims +
                                               threadIdx.x % kValueThreads * PieceElements(dtype));
    if (dtype == DType::kF32) {
#pragma unroll
      for (int n = 0; n < kThreadValues; ++n) add(AsFloats(raw_[n]), sum);
    } else {
#pragma unroll
      for (int n = 0; n < kThreadValues; ++n) {
        add(WidenFour(dtype, raw_[n].x, raw_[n].y), sum);
        add(WidenFour(dtype, raw_[n].z, raw_[n].w), sum + 4);
      }
      to[1] = mean(sum + 4);
    }
    to[0] = mean(sum);
  }
  __device__ static float4 AsFloats(uint4 raw) {
    return make_float4(__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z),
                       __uint_as_float(raw.w));
  }
  __device__ void Load(const EncodeWork& work, int piece) {
#pragma unroll
    for (int n = 0; n < kThreadValues; ++n) {
      if (piece >= pieces_) break;
      const std::byte* const row = rows_ + n * work.row_bytes;
      if (work.row_type == RowType::kInt8) {
        raw_[n] = DecodedPiece(work.format(), row, piece);
      } else {
        raw_[n] = __ldcs(reinterpret_cast<const uint4*>(row + work.row_bytes / 2) + piece);
      }
    }
  }
  // 16 bytes of a value in the dtype.
  __device__ static uint4 DecodedPiece(const RowFormat& format, const std::byte* row, int piece) {
    if (format.dtype == DType::kF32) {
      const float4 x = ValueFour(format, row, piece);
      return make_uint4(__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z),
                        __float_as_uint(x.w));
    }
    return PackEight(format.dtype, ValueFour(format, row, 2 * piece),
                     ValueFour(format, row, 2 * piece + 1));
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
        add(AsFloats(raw_[n]), c, sum[n]);
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

  const std::byte* rows_;  // first row of the thread
  int pieces_;             // per value
  uint4 raw_[kThreadValues];
};

// ValueExponent() of a row's distance from its approximate square; false if that does not determine
// it. A sum of up to 256 squares has a relative error below 2^-17, and so has the sum in the fixed
// order.
__device__ inline bool RoughExponent(const HeadStatistics& head, float square, int& exponent) {
  constexpr float kErrorMax = 0x1p-16f;
  constexpr float kSmall = 0x1p-100f;
  // Outside these ranges, distances in fp32 may have few valid bits, or none.
  if (!(square < 0x1p80f)) return false;
  if (!(head.value_reference > kSmall && head.value_reference < 1 / kSmall)) return false;
  const float ratio = __fsqrt_rn(square) * (head.value_unit / head.value_reference);
  exponent = ValueExponent(ratio * (1 - kErrorMax), 1.0f);
  return exponent == ValueExponent(ratio * (1 + kErrorMax), 1.0f);
}

// ValueLift() of a page, for a warp. exponent: of the lane's four values. value_centre: of the
// page; first_centre: of the first pages.
__device__ inline int PageLift(const HeadStatistics& head, int dim, float4 exponent,
                               const float* value_centre, const float* first_centre) {
  const float median =
      WarpElement<4>({exponent.x, exponent.y, exponent.z, exponent.w}, kPageTokenCount / 2);
  const float apart = WarpRadius(
      [&](int i) { return reinterpret_cast<const float4*>(value_centre)[i]; }, first_centre, dim);
  return ValueLift(static_cast<int>(median), ValueExponent(apart, head.value_reference),
                   head.value_floor);
}

// Stores the page's norm bytes. radius [128]: of the keys; uneven: IsUneven(radius).
// All threads of the block.
__device__ inline void StoreNorms(const EncodeWork& work, const HeadStatistics& head,
                                  const float* first_centre, const std::byte* rows,
                                  PageScratch& scratch, const float* radius, bool uneven,
                                  std::byte* page) {
  const int token = threadIdx.x;
  int exponent = 0;
  if (token < kPageTokenCount) {
    const bool known = RoughExponent(head, scratch.square[token], exponent);
    // Exact distances for the other rows, by the whole warp one after the other.
    for (unsigned left = __ballot_sync(kFullWarp, !known); left != 0; left &= left - 1) {
      const int lane = __ffs(left) - 1;
      const std::byte* row = rows + (token / 32 * 32 + lane) * work.row_bytes;
      const float distance = WarpRadius([&](int i) { return ValueFour(work.format(), row, i); },
                                        scratch.value_centre, work.head_dim);
      if (token % 32 == lane) exponent = ValueExponent(distance, head.value_reference);
    }
    scratch.exponent[token] = static_cast<float>(exponent);
  }
  __syncthreads();
  if (token >= kPageTokenCount) return;
  const int lift =
      PageLift(head, work.head_dim, reinterpret_cast<const float4*>(scratch.exponent)[token % 32],
               scratch.value_centre, first_centre);
  // Only an uneven page has keys far enough away to be strays.
  const bool stray = uneven && IsStray(radius[token], MedianRadius(radius), head.median_radius);
  NormAt(work.tiling, page, token) = NormByte(stray, exponent, head.value_floor, lift);
}

}  // namespace spillway::cuda

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gpu/kernels/device_math.cuh"

// Products of 16-bit matrices on tensor cores, with fp32 sums. A warp multiplies A [16][16] by B
// [16][8]; lane l holds of each matrix:
//   A  four pairs: (row l / 4, columns c, c + 1), (row + 8, the same), then both with c + 8
//   B  two pairs: (rows c, c + 1, column l / 4), then both with c + 8
//   D  (row l / 4, columns c, c + 1), (row + 8, the same)
// where c = 2 (l % 4). The first element of a pair is the low half of its word.
namespace spillway::cuda {

template <DType kDType>
concept SixteenBits = kDType == DType::kBF16 || kDType == DType::kF16;

// d += a b.
template <DType kDType>
requires SixteenBits<kDType> __device__ inline void MultiplyAdd(float (&d)[4],
                                                                const uint32_t (&a)[4], uint32_t b0,
                                                                uint32_t b1) {
  if constexpr (kDType == DType::kBF16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Loads A from shared memory. Each lane gives the address of 8 elements: row lane % 16, from column
// lane / 16 * 8 on. All lanes.
__device__ inline void LoadMatrix(uint32_t (&a)[4], const std::byte* elements) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(elements)))
               : "memory");
}
// Loads A from its transpose, whose 16 rows are A's columns. Each lane gives the address of 8
// elements of the transpose: row lane % 8 + lane / 16 * 8, from column lane / 8 % 2 * 8 on.
__device__ inline void LoadTransposed(uint32_t (&a)[4], const std::byte* elements) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(elements)))
               : "memory");
}

// Transposes a matrix [8][8] of which lane l holds row l / 4, columns c and c + 1. All lanes.
__device__ inline uint32_t Transposed(uint32_t pair) {
  uint32_t out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

// Terms of 16 bits whose sum is a float, rounded to fewer bits if there are fewer terms: three of
// bf16 hold all 24 bits, two 16; two of f16 hold 22, within f16's range.
template <DType kDType>
inline constexpr int kFloatTerms = kDType == DType::kBF16 ? 3 : 2;

// The next term of a float: rounds x, and leaves what is lost in x.
template <DType kDType>
requires SixteenBits<kDType> __device__ inline uint16_t TakeTerm(float& x) {
  if constexpr (kDType == DType::kBF16) {
    const __nv_bfloat16 term = __float2bfloat16_rn(x);
    x -= __bfloat162float(term);
    return __bfloat16_as_ushort(term);
  } else {
    const __half term = __float2half_rn(x);
    x -= __half2float(term);
    return __half_as_ushort(term);
  }
}
// What floats of up to `largest` are divided by, so that their terms are in f16's range: the power
// of two below it becomes 2^14.
__device__ inline float F16Unit(float largest) {
  const uint32_t exponent = __float_as_uint(largest) & 0x7F800000u;
  constexpr uint32_t kFourteen = 14u << 23;
  const bool divides = exponent > kFourteen && exponent != 0x7F800000u;
  return divides ? __uint_as_float(exponent - kFourteen) : 1.0f;
}
// Of two floats, as a pair.
template <DType kDType>
__device__ inline uint32_t TakeTerms(float& x, float& y) {
  const uint32_t low = TakeTerm<kDType>(x);
  return low | static_cast<uint32_t>(TakeTerm<kDType>(y)) << 16;
}

}  // namespace spillway::cuda

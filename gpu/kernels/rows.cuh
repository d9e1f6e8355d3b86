#pragma once

#include "gpu/kernels/device_math.cuh"

// Tiles of rows in shared memory, as fp32.
namespace spillway::cuda {

// Floats from one row of a tile to the next. Rows start 16 bytes further in the banks each, so that
// threads with one row each read without conflicts.
__host__ __device__ inline int TileStride(int elements) { return elements + 4; }

// Rows of a tile. A tile of keys and values then takes about 33 KiB.
__host__ __device__ inline int TileRows(int head_dim) { return head_dim <= 128 ? 32 : 16; }

// Loads the first `elements` elements of `count` rows into a tile, as fp32. row_at(i): the address
// of row i. change(element, x): what is stored for elements [element, element + 4) with values x.
// kInFlight: loads that a thread has in flight before it uses the first, because rows may be across
// the link. All threads of the block; the caller synchronises.
template <int kInFlight, typename RowAt, typename Change>
__device__ inline void LoadTile(DType dtype, int elements, int count, RowAt row_at, Change change,
                                float* tile) {
  const int stride = TileStride(elements);
  const int per_load = dtype == DType::kF32 ? 4 : 8;
  const int loads = elements / per_load;
  for (int base = threadIdx.x; base < count * loads; base += kInFlight * blockDim.x) {
    uint4 raw[kInFlight];
#pragma unroll
    for (int f = 0; f < kInFlight; ++f) {
      const int i = base + f * blockDim.x;
      if (i < count * loads) raw[f] = reinterpret_cast<const uint4*>(row_at(i / loads))[i % loads];
    }
#pragma unroll
    for (int f = 0; f < kInFlight; ++f) {
      const int i = base + f * blockDim.x;
      if (i >= count * loads) break;
      const int element = i % loads * per_load;
      float4* to = reinterpret_cast<float4*>(tile + i / loads * stride + element);
      const auto* bytes = reinterpret_cast<const std::byte*>(&raw[f]);
      to[0] = change(element, LoadFour(dtype, bytes, 0));
      if (per_load == 8) to[1] = change(element + 4, LoadFour(dtype, bytes, 1));
    }
  }
}
template <typename RowAt>
__device__ inline void LoadTile(DType dtype, int elements, int count, RowAt row_at, float* tile) {
  LoadTile<4>(
      dtype, elements, count, row_at, [](int, float4 x) { return x; }, tile);
}

// a . b of d floats, in four interleaved chains.
__device__ inline float Dot(const float* a, const float* b, int d) {
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
  for (int i = 0; i < d / 4; ++i) {
    const float4 x = reinterpret_cast<const float4*>(a)[i];
    const float4 y = reinterpret_cast<const float4*>(b)[i];
    sum.x = fmaf(x.x, y.x, sum.x);
    sum.y = fmaf(x.y, y.y, sum.y);
    sum.z = fmaf(x.z, y.z, sum.z);
    sum.w = fmaf(x.w, y.w, sum.w);
  }
  return (sum.x + sum.y) + (sum.z + sum.w);
}

}  // namespace spillway::cuda

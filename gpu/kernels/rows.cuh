#pragma once

#include "gpu/kernels/int8_rows.cuh"

// Tiles of rows in shared memory, as fp32.
namespace spillway::cuda {

// Floats from one row of a tile to the next. Rows start 16 bytes further in the banks each, so that
// threads with one row each read without conflicts.
__host__ __device__ inline int TileStride(int elements) { return elements + 4; }

// Rows of a tile. A tile of keys and values then takes about 33 KiB.
__host__ __device__ inline int TileRows(int head_dim) { return head_dim <= 128 ? 32 : 16; }

// The same as LoadTile() for rows of 8 bits.
template <int kInFlight, typename RowAt, typename Change>
__device__ inline void LoadInt8Tile(const RowFormat& format, int elements, int count, RowAt row_at,
                                    Change change, float* tile) {
  const int d = format.head_dim;
  const int stride = TileStride(elements);
  const int loads = elements / 16;
  for (int base = threadIdx.x; base < count * loads; base += kInFlight * blockDim.x) {
    uint4 raw[kInFlight];
    float2 scales[kInFlight];
#pragma unroll
    for (int f = 0; f < kInFlight; ++f) {
      const int i = base + f * blockDim.x;
      if (i >= count * loads) break;
      const std::byte* const row = row_at(i / loads);
      raw[f] = reinterpret_cast<const uint4*>(row)[i % loads];
      scales[f] = Int8Scales(d, row);
    }
#pragma unroll
    for (int f = 0; f < kInFlight; ++f) {
      const int i = base + f * blockDim.x;
      if (i >= count * loads) break;
      const int element = i % loads * 16;
      const float scale = element < d ? scales[f].x : scales[f].y;
      float4* const to = reinterpret_cast<float4*>(tile + i / loads * stride + element);
      to[0] = Int8Four(raw[f].x, scale);
      to[1] = Int8Four(raw[f].y, scale);
      to[2] = Int8Four(raw[f].z, scale);
      to[3] = Int8Four(raw[f].w, scale);
    }
  }
  __syncthreads();
  const int highs = Int8HighCount(d);
  for (int i = threadIdx.x; i < count * highs; i += blockDim.x) {
    const std::byte* const row = row_at(i / highs);
    const Int8HighPart high = LoadHighPart(d, row, i % highs);
    if (high.element < elements) {
      tile[i / highs * stride + high.element] += Int8Addend(high, Int8Scales(d, row));
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count * elements / 4; i += blockDim.x) {
    const int element = i % (elements / 4) * 4;
    float4& four = *reinterpret_cast<float4*>(tile + i / (elements / 4) * stride + element);
    four =
        change(element,
               make_float4(RoundToDType(format.dtype, four.x), RoundToDType(format.dtype, four.y),
                           RoundToDType(format.dtype, four.z), RoundToDType(format.dtype, four.w)));
  }
}

// Loads the first `elements` elements of `count` rows into a tile, as fp32. row_at(i): the address
// of row i. change(element, x): what is stored for elements [element, element + 4) with values x.
// kInFlight: loads that a thread has in flight before it uses the first, because rows may be across
// the link. All threads of the block; the caller synchronises.
template <int kInFlight, typename RowAt, typename Change>
__device__ inline void LoadTile(const RowFormat& format, int elements, int count, RowAt row_at,
                                Change change, float* tile) {
  if (format.type == RowType::kInt8) {
    return LoadInt8Tile<kInFlight>(format, elements, count, row_at, change, tile);
  }
  const DType dtype = format.dtype;
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
__device__ inline void LoadTile(const RowFormat& format, int elements, int count, RowAt row_at,
                                float* tile) {
  LoadTile<4>(
      format, elements, count, row_at, [](int, float4 x) { return x; }, tile);
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

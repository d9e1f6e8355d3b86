#pragma once

#include "gpu/kernels/logits.cuh"
#include "gpu/methods/request.h"
#include "host/methods/int4_keys/int4_range.h"

// Logits from 4-bit elements behind the codes: of the whole key, or of Double Sparsity's label
// channels.
namespace spillway::cuda {

// A source for the kernels of logits.cuh. kRows: at least the number of query heads.
template <int kRows>
class Int4Estimates {
 public:
  struct Context {
    int channels;
    int64_t offset;                // of the section in an index page
    const MethodRequest* methods;  // of the units, for label channels; null: all in order
  };
  static size_t Bytes(const AttendShape& s, const Context&) {
    return sizeof(float) * kRows * (s.head_dim + 1);
  }
  __device__ Int4Estimates(const AttendShape& shape, const Context& context, const UnitRequest& u,
                           float* memory)
      : u_(u), queries_(memory), channels_(context.channels), offset_(context.offset) {
    const uint16_t* const labels =
        context.methods != nullptr ? context.methods[blockIdx.y].channels : nullptr;
    for (int i = threadIdx.x; i < channels_ * kRows; i += blockDim.x) {
      const int channel = labels != nullptr ? labels[i / kRows] : i / kRows;
      const int head = i % kRows;
      queries_[i] = head < shape.group ? u.q[head * shape.head_dim + channel] * shape.scale : 0.0f;
    }
    __syncthreads();
    if (threadIdx.x < kRows) {
      float sum = 0;
      for (int i = 0; i < channels_; ++i) sum += queries_[i * kRows + threadIdx.x];
      queries_[channels_ * kRows + threadIdx.x] = sum;
    }
    __syncthreads();
  }
  __device__ void Compute(int64_t page_index, int) {
    const auto* words =
        reinterpret_cast<const uint32_t*>(u_.code_pages[page_index] + offset_) + threadIdx.x;
    float dots[kRows] = {};
#pragma unroll 2
    for (int w = 0; w < channels_ / 8; ++w) {
      const uint32_t word = __ldcs(words + w * kPageTokenCount);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const auto x = static_cast<float>(word >> (4 * i) & 15u);
#pragma unroll
        for (int h = 0; h < kRows; h += 4) {
          const float4 q = *reinterpret_cast<const float4*>(queries_ + (8 * w + i) * kRows + h);
          dots[h] = fmaf(q.x, x, dots[h]);
          dots[h + 1] = fmaf(q.y, x, dots[h + 1]);
          dots[h + 2] = fmaf(q.z, x, dots[h + 2]);
          dots[h + 3] = fmaf(q.w, x, dots[h + 3]);
        }
      }
    }
    const Int4Range range = Int4Range::Unpack(__ldcs(words + channels_ / 8 * kPageTokenCount));
#pragma unroll
    for (int h = 0; h < kRows; ++h) {
      logits_[h] = CutEstimate(range.Dot(dots[h], queries_[channels_ * kRows + h]));
    }
  }
  __device__ float Get(int head) const {
    float l = 0;
#pragma unroll
    for (int h = 0; h < kRows; ++h) l = h == head ? logits_[h] : l;
    return l;
  }

 private:
  const UnitRequest& u_;
  float* queries_;  // [channels][kRows], scaled, then their sums over the channels [kRows]
  int channels_;
  int64_t offset_;
  float logits_[kRows];
};

}  // namespace spillway::cuda

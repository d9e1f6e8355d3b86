#pragma once

#include "gpu/kernels/logits.cuh"
#include "host/methods/int4_keys/int4_range.h"

// Logits from Quest's bounds of the keys of a page.
namespace spillway::cuda {

// The largest logit that the bounds of a token's Quest page allow.
class BoundEstimates {
 public:
  static constexpr int kPagesMax = 8;  // Quest pages in an index page
  struct Context {
    int pages;       // Quest pages in an index page
    int64_t offset;  // bytes to the bounds in an index page
  };
  static size_t Bytes(const AttendShape& s, const Context&) {
    return sizeof(float) * s.group * (s.head_dim + kPagesMax);
  }
  __device__ BoundEstimates(const AttendShape& shape, const Context& context, const UnitRequest& u,
                            float* memory)
      : shape_(shape),
        context_(context),
        u_(u),
        queries_(memory),
        logits_(memory + shape.group * shape.head_dim) {
    for (int i = threadIdx.x; i < shape.group * shape.head_dim; i += blockDim.x) {
      queries_[i] = u.q[i] * shape.scale;
    }
  }
  __device__ void Compute(int64_t page_index, int) {
    const int d = shape_.head_dim;
    const int pages = context_.pages;
    const std::byte* bounds = u_.code_pages[page_index] + context_.offset;
    __syncthreads();  // the previous page has been read
    for (int task = threadIdx.x; task < pages * shape_.group; task += blockDim.x) {
      const int page = task % pages;
      const int head = task / pages;
      float sum = 0;
      for (int i = 0; i < d; ++i) {
        const float q = queries_[head * d + i];
        const float low = q * LoadElement(shape_.dtype, bounds, i * pages + page);
        const float high = q * LoadElement(shape_.dtype, bounds, (d + i) * pages + page);
        sum += low > high ? low : high;
      }
      logits_[head * kPagesMax + page] = CutEstimate(sum);
    }
    __syncthreads();
  }
  __device__ float Get(int head) const {
    const int page = static_cast<int>(threadIdx.x) / (kPageTokenCount / context_.pages);
    return logits_[head * kPagesMax + page];
  }

 private:
  const AttendShape& shape_;
  const Context& context_;
  const UnitRequest& u_;
  float* queries_;  // [G][d], scaled
  float* logits_;   // [G][kPagesMax]
};

}  // namespace spillway::cuda

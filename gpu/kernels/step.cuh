#pragma once

#include <cuda_bf16.h>

#include "gpu/kernels/device_math.cuh"

// Access to the tensors of a step's caller.
namespace spillway::cuda {

// Element i of the queries [rows][d] that begin at `place`: the G heads of one token, then those of
// the next.
__device__ inline float TensorQuery(const CallerTensors& step, const UnitPlace& place, int group,
                                    int head_dim, int i) {
  const int row = i / head_dim;
  const std::byte* head = step.q.At(place.item, place.query + row / group,
                                    int64_t{place.group_index} * group + row % group);
  return LoadElement(step.q_dtype, head, i % head_dim);
}

__device__ inline void StoreElement(DType dtype, std::byte* base, int i, float x) {
  if (dtype == DType::kF32) {
    reinterpret_cast<float*>(base)[i] = x;
  } else if (dtype == DType::kF16) {
    reinterpret_cast<__half*>(base)[i] = __float2half_rn(x);
  } else {
    reinterpret_cast<__nv_bfloat16*>(base)[i] = __float2bfloat16_rn(x);
  }
}

// Whether the launch serves the step that was announced last, and the item's inputs are finite.
__device__ inline bool StepHolds(const StepCheck& check, int item) {
  // Loaded at once: none waits for what another one says.
  const StepHeader header = *check.header;
  const BadElement bad = check.bad[item];
  return header.version == check.version && static_cast<uint32_t>(bad >> 32) != header.number;
}

// Writes the output of one query row, `row` rows after `place`: value(i) for element i, or NaN for
// all elements unless `good`, which includes StepHolds(). Fills the report. All threads.
template <typename Value>
__device__ inline void WriteToTensors(const CallerTensors& step, const UnitPlace& place, int group,
                                      int head_dim, int row, bool good, Value value, float lse,
                                      StepReport& report) {
  const int64_t token = place.query + row / group;
  const int64_t head = int64_t{place.group_index} * group + row % group;
  std::byte* out = step.out.At(place.item, token, head);
  bool overflow = false;
  for (int i = threadIdx.x; i < head_dim; i += blockDim.x) {
    const float x = good ? value(i) : NAN;
    overflow |= good && !isfinite(x);
    StoreElement(step.out_dtype, out, i, x);
  }
  overflow = __syncthreads_or(overflow) != 0;
  if (threadIdx.x != 0) return;
  if (step.lse != nullptr) {
    step.lse[(place.item * int64_t{step.token_count} + token) * step.query_head_count + head] =
        good ? lse : NAN;
  }
  report.overflow[row] = overflow ? 1 : 0;
  if (row != 0) return;
  const StepHeader& header = *step.check.header;
  report.version = step.check.version;
  report.number = header.number;
  const BadElement bad = step.check.bad[place.item];
  report.bad = static_cast<uint32_t>(bad >> 32) == header.number ? bad : 0;
}

}  // namespace spillway::cuda

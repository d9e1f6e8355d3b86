#pragma once

#include "gpu/kernels/encode_page.cuh"
#include "gpu/kernels/finite.cuh"
#include "gpu/kernels/int8_rows.cuh"
#include "gpu/kernels/step.cuh"
#include "gpu/kernels/step_append.h"

// Kernels for the append of a step from GPU memory.
namespace spillway::cuda {

// Loads 16 bytes of a vector. If an element is not finite, returns 0 and records the element in
// `bad`.
__device__ inline uint4 LoadChecked(DType dtype, const std::byte* base, int i, uint32_t number,
                                    StepInput input, int64_t token, int64_t head, BadElement* bad) {
  const uint4 bytes = reinterpret_cast<const uint4*>(base)[i];
  const int at = FirstBad(dtype, bytes);
  if (at < 0) return bytes;
  atomicMax(bad, MakeBadElement(number, input, token, head, i * ElementsOf16(dtype) + at));
  return make_uint4(0, 0, 0, 0);
}

// One thread per item.
__global__ void StepLengthsKernel(const StepLength* lengths, int item_count, StepCheck check) {
  if (check.header->version != check.version) return;
  for (int i = static_cast<int>(threadIdx.x); i < item_count; i += static_cast<int>(blockDim.x)) {
    const StepLength length = lengths[i];
    if (length.word == nullptr || check.bad[i] >> 32 == check.header->number) continue;
    volatile unsigned long long* const word = length.word;
    if (*word != length.before) continue;
    // The previous launch has written the rows, which are in host memory like the length. They must
    // be visible before the length is.
    __threadfence_system();
    *word = length.after;
  }
}

inline constexpr int kStepAppendWarps = 4;

// Writes a row of 8 bits to its targets, by one warp; the first element that is not finite goes to
// `bad`. own: shared memory.
__device__ inline void AppendInt8Row(const TensorAppend& a, const std::byte* k, const std::byte* v,
                                     const RowTarget& target, uint32_t number, int64_t token,
                                     int64_t head, BadElement* bad, std::byte* own) {
  EncodeInt8Row(
      a.dtype, a.head_dim,
      [&](int half, int i) {
        const float x = LoadElement(a.dtype, half == 0 ? k : v, i);
        if (isfinite(x)) return x;
        atomicMax(
            bad, MakeBadElement(number, half == 0 ? StepInput::kK : StepInput::kV, token, head, i));
        return 0.0f;
      },
      own);
  for (int j = threadIdx.x % 32; j < Int8RowBytes(a.head_dim) / 16; j += 32) {
    const uint4 bytes = reinterpret_cast<const uint4*>(own)[j];
    reinterpret_cast<uint4*>(target.row)[j] = bytes;
    if (target.resident != nullptr) reinterpret_cast<uint4*>(target.resident)[j] = bytes;
    if (target.recent != nullptr) reinterpret_cast<uint4*>(target.recent)[j] = bytes;
    if (target.whole != nullptr) reinterpret_cast<uint4*>(target.whole)[j] = bytes;
  }
  __syncwarp();
}

// One warp per row of K and V, then one warp per query head, which is only checked.
// kStepAppendWarps.
__global__ void TensorAppendKernel(TensorAppend a) {
  __shared__ __align__(16) std::byte stored[kStepAppendWarps][kInt8RowBytesMax];
  TriggerDependents();
  const StepCheck& check = a.step.check;
  if (check.header->version != check.version) return;
  const uint32_t number = check.header->number;
  const int lane = threadIdx.x % 32;
  const int64_t warp = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  const int64_t warps = int64_t{gridDim.x} * blockDim.x / 32;
  const int64_t tokens = a.step.token_count;
  const int64_t rows = a.item_count * tokens * a.kv_head_count;
  if (blockIdx.x == 0) {
    for (int i = static_cast<int>(threadIdx.x); i < a.clear_count; i += blockDim.x) {
      a.clear[i] = kNoToken;
    }
  }
  const int half = a.head_dim * (a.dtype == DType::kF32 ? 4 : 2) / 16;
  for (int64_t i = warp; i < rows; i += warps) {
    const int64_t head = i % a.kv_head_count;
    const int64_t token = i / a.kv_head_count % tokens;
    const int64_t item = i / (a.kv_head_count * tokens);
    const RowTarget target = a.targets[i];
    const std::byte* k = a.k.At(item, token, head);
    const std::byte* v = a.v.At(item, token, head);
    if (a.row_type == RowType::kInt8) {
      AppendInt8Row(a, k, v, target, number, token, head, a.bad + item, stored[threadIdx.x / 32]);
      continue;
    }
    for (int j = lane; j < 2 * half; j += 32) {
      const bool key = j < half;
      const uint4 bytes =
          LoadChecked(a.dtype, key ? k : v, key ? j : j - half, number,
                      key ? StepInput::kK : StepInput::kV, token, head, a.bad + item);
      reinterpret_cast<uint4*>(target.row)[j] = bytes;
      if (target.resident != nullptr) reinterpret_cast<uint4*>(target.resident)[j] = bytes;
      if (target.recent != nullptr) reinterpret_cast<uint4*>(target.recent)[j] = bytes;
      if (target.whole != nullptr) reinterpret_cast<uint4*>(target.whole)[j] = bytes;
    }
  }
  const int64_t query_heads = a.step.query_head_count;
  const int q_chunks = a.head_dim * (a.step.q_dtype == DType::kF32 ? 4 : 2) / 16;
  for (int64_t i = warp; i < a.item_count * tokens * query_heads; i += warps) {
    const int64_t head = i % query_heads;
    const int64_t token = i / query_heads % tokens;
    const int64_t item = i / (query_heads * tokens);
    const std::byte* q = a.step.q.At(item, token, head);
    for (int j = lane; j < q_chunks; j += 32) {
      LoadChecked(a.step.q_dtype, q, j, number, StepInput::kQ, token, head, a.bad + item);
    }
  }
}

// blockIdx.x: KV head; blockIdx.y: item. Shared memory: EncodePageSharedBytes().
__global__ void __launch_bounds__(kPageThreads, 2)
    StepEncodeKernel(const StepEncode* encodes, RotationWeights weights, PageCoding coding) {
  GridDependencyWait();
  TriggerDependents();
  const StepEncode& encode = encodes[blockIdx.y];
  if (encode.work.begin >= encode.work.end) return;
  const EncodeWork work = encode.work;
  EncodePage(work, weights, coding, encode.heads, /*first=*/nullptr, work.begin / kPageTokenCount,
             blockIdx.x);
}

}  // namespace spillway::cuda

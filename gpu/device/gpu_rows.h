#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "gpu/device/job_context.h"
#include "host/memory/layer_rows.h"

namespace spillway::cuda {

// For rows of a caller's tensor `name`, which kernels read or write in pieces of 16 bytes.
// INVALID_ARGUMENT if the address is not in the memory of this GPU.
absl::Status CheckInGpu(const Gpu& gpu, std::string_view name, const void* address);
// INVALID_ARGUMENT if rows are not aligned to 16 bytes. Strides are in bytes.
absl::Status CheckAligned(std::string_view name, const void* data, int64_t head_stride,
                          int64_t token_stride);

// The GPU's copy engines move K and V of rows between their pages and a caller's tensors, each as
// one pitched copy. They take no multiprocessor, so the model's kernels keep all of them.

// Whether K or V of `half_bytes` a row, with these strides in bytes, can be moved so.
bool EngineMoves(int64_t half_bytes, int64_t k_token_stride, int64_t v_token_stride);
// Of `adjacent` rows from `token` on, which are contiguous (LayerRows::AdjacentRows), the number
// that one pair of copies can move, at least 1: they are in one registered extent.
int64_t EngineRun(const LayerRows& rows, int kv_head, int64_t token, int64_t adjacent);
// Enqueues the copies of K and V of `count` rows, as EngineRun() says. row: the first one in its
// page.
cudaError_t EngineToRows(std::byte* row, int64_t row_bytes, const std::byte* k,
                         int64_t k_token_stride, const std::byte* v, int64_t v_token_stride,
                         int64_t count, cudaStream_t stream);
cudaError_t EngineFromRows(const std::byte* row, int64_t row_bytes, std::byte* k,
                           int64_t k_token_stride, std::byte* v, int64_t v_token_stride,
                           int64_t count, cudaStream_t stream);

}  // namespace spillway::cuda

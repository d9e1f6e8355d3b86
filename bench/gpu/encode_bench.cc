// The GPU's encoder of many keys: their bytes a second, from GPU memory. A
// sample of the codes is compared with the CPU's first. Prints one JSON object
// a line.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/cuda/buffer.h"
#include "gpu/cuda/error.h"
#include "gpu/cuda/stream.h"
#include "gpu/kernels/encode.h"
#include "host/base/status_macros.h"
#include "host/codes/rotation.h"
#include "host/cpu/kernels.h"

namespace spillway::cuda {
namespace {

constexpr int kHeadDim = 128;
constexpr int kBitsPerDim = HashSpec().bits_per_dim;
constexpr int kHeads = 8;
constexpr int64_t kTokens = 65536;  // of a head
constexpr int64_t kPages = kTokens / kPageTokenCount;
constexpr int64_t kRowBytes = 2 * kHeadDim * 2;
constexpr int kChecked = 1000;
constexpr int kWarmUps = 3;
constexpr int kRuns = 20;

absl::StatusOr<DeviceBuffer> Upload(const void* data, int64_t bytes, MemoryBudget& budget) {
  absl::StatusOr<DeviceBuffer> buffer = DeviceBuffer::Create(bytes, &budget, "the benchmark");
  if (!buffer.ok()) return buffer;
  SPILLWAY_CUDA_RETURN_IF_ERROR(
      cudaMemcpy(buffer->data(), data, static_cast<size_t>(bytes), cudaMemcpyHostToDevice));
  return buffer;
}
template <typename T>
absl::StatusOr<DeviceBuffer> Upload(const std::vector<T>& values, MemoryBudget& budget) {
  return Upload(values.data(), static_cast<int64_t>(values.size() * sizeof(T)), budget);
}

// Compares random tokens' codes with the CPU's.
absl::Status CheckCodes(const std::vector<uint16_t>& rows, const std::vector<std::byte>& codes,
                        const CodeTiling& tiling, EncodeParams params,
                        const std::vector<float>& centre) {
  std::mt19937_64 random(7);
  std::vector<std::byte> page(params.layout.page_bytes());
  for (int n = 0; n < kChecked; ++n) {
    const int64_t head = static_cast<int64_t>(random() % kHeads);
    const int64_t token = static_cast<int64_t>(random() % kTokens);
    const int slot = static_cast<int>(token % kPageTokenCount);
    params.centre = centre.data() + head * kHeadDim;
    const uint16_t* row = rows.data() + (head * kTokens + token) * (kRowBytes / 2);
    EncodeKey(params, DType::kBF16, reinterpret_cast<const std::byte*>(row), page.data(), slot);
    // The GPU's code as the CPU would lay it out.
    const std::byte* gpu_page =
        codes.data() + (head * kPages + token / kPageTokenCount) * tiling.page_bytes();
    const auto* words = reinterpret_cast<const uint32_t*>(gpu_page);
    uint8_t levels[kHeadDim] = {};
    for (int plane = 0; plane < tiling.planes; ++plane) {
      for (int j = 0; j < kHeadDim; ++j) {
        const uint32_t word = words[tiling.word_offset(plane, slot, j / 32)];
        levels[j] |= static_cast<uint8_t>((word >> (j % 32) & 1) << plane);
      }
    }
    std::vector<std::byte> same = page;
    StoreCode(params.layout, levels, same.data(), slot);
    std::memcpy(same.data() + params.layout.factor_offset_bytes() + slot * 2,
                gpu_page + tiling.factor_offset_bytes() + cuda::CodeTiling::factor_index(slot) * 2,
                2);
    if (same != page) {
      return absl::InternalError("the code of head " + std::to_string(head) + " token " +
                                 std::to_string(token) + " is not the CPU's");
    }
  }
  return absl::OkStatus();
}

absl::Status Run() {
  MemoryBudget budget(std::numeric_limits<int64_t>::max());
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  // K is random, V is not read. A token's bf16 numbers are cut, not rounded.
  std::vector<uint16_t> rows(kHeads * kTokens * (kRowBytes / 2));
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i % (2 * kHeadDim) >= kHeadDim) continue;
    const float x = normal(random);
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    rows[i] = static_cast<uint16_t>(bits >> 16);
  }
  std::vector<float> centre(kHeads * kHeadDim);
  for (float& c : centre) c = 0.25f * normal(random);
  ModelSpec spec;
  spec.head_dim = kHeadDim;
  spec.hash = {.kind = HashKind::kRotation, .bits_per_dim = kBitsPerDim};
  const std::vector<float> rotation = MakeRotation(kHeadDim, 42, 0);
  std::vector<float> transposed(rotation.size());
  for (int i = 0; i < kHeadDim; ++i) {
    for (int j = 0; j < kHeadDim; ++j) transposed[i * kHeadDim + j] = rotation[j * kHeadDim + i];
  }
  EncodeParams params;
  params.head_dim = kHeadDim;
  params.bits_per_dim = kBitsPerDim;
  params.layout = CodeLayout::Of(spec);
  params.rotation = rotation.data();
  params.rotation_transposed = transposed.data();

  const CodeTiling tiling = CodeTiling::Of(spec);
  std::vector<std::byte> codes(kHeads * kPages * tiling.page_bytes(), std::byte{0xCD});
  absl::StatusOr<DeviceBuffer> device_rows = Upload(rows, budget);
  if (!device_rows.ok()) return device_rows.status();
  absl::StatusOr<DeviceBuffer> device_codes = Upload(codes, budget);
  if (!device_codes.ok()) return device_codes.status();
  absl::StatusOr<DeviceBuffer> device_centre = Upload(centre, budget);
  if (!device_centre.ok()) return device_centre.status();
  absl::StatusOr<DeviceBuffer> device_rotation = Upload(transposed, budget);
  if (!device_rotation.ok()) return device_rotation.status();
  std::vector<const std::byte*> row_page_list;
  std::vector<std::byte*> code_page_list;
  for (int64_t p = 0; p < kHeads * kPages; ++p) {
    row_page_list.push_back(device_rows->data() + p * kPageTokenCount * kRowBytes);
    code_page_list.push_back(device_codes->data() + p * tiling.page_bytes());
  }
  absl::StatusOr<DeviceBuffer> row_pages = Upload(row_page_list, budget);
  if (!row_pages.ok()) return row_pages.status();
  absl::StatusOr<DeviceBuffer> code_pages = Upload(code_page_list, budget);
  if (!code_pages.ok()) return code_pages.status();

  EncodeWork work;
  work.dtype = DType::kBF16;
  work.head_dim = kHeadDim;
  work.kv_head_count = kHeads;
  work.row_bytes = kRowBytes;
  work.end = kTokens;
  work.row_pages = reinterpret_cast<const std::byte* const*>(row_pages->data());
  work.row_page_capacity = kPages;
  work.code_pages = reinterpret_cast<std::byte* const*>(code_pages->data());
  work.code_page_capacity = kPages;
  work.tiling = tiling;
  work.centre = reinterpret_cast<float*>(device_centre->data());
  const RotationWeights weights = {kBitsPerDim,
                                   reinterpret_cast<const float*>(device_rotation->data())};

  absl::StatusOr<Stream> stream = Stream::Create();
  if (!stream.ok()) return stream.status();
  absl::StatusOr<Event> start = Event::Create(/*timing=*/true);
  if (!start.ok()) return start.status();
  absl::StatusOr<Event> stop = Event::Create(/*timing=*/true);
  if (!stop.ok()) return stop.status();
  // The copies above ran on another stream.
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaDeviceSynchronize());
  std::vector<float> times_ms;
  for (int run = 0; run < kWarmUps + kRuns; ++run) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventRecord(start->get(), stream->get()));
    SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchEncodeRotation(work, weights, stream->get()));
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventRecord(stop->get(), stream->get()));
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventSynchronize(stop->get()));
    if (run == 0) {
      SPILLWAY_CUDA_RETURN_IF_ERROR(
          cudaMemcpy(codes.data(), device_codes->data(), codes.size(), cudaMemcpyDeviceToHost));
      RETURN_IF_ERROR(CheckCodes(rows, codes, tiling, params, centre));
    }
    if (run < kWarmUps) continue;
    float ms = 0;
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventElapsedTime(&ms, start->get(), stop->get()));
    times_ms.push_back(ms);
  }
  std::sort(times_ms.begin(), times_ms.end());
  const double us = 1e3 * (times_ms[kRuns / 2 - 1] + times_ms[kRuns / 2]) / 2;
  constexpr int64_t kKeyBytes = kHeads * kTokens * kHeadDim * 2;
  std::printf(
      "{\"name\":\"encode\",\"bits_per_dim\":%d,\"tokens\":%lld,\"key_bytes\":%lld,\"us\":%.1f,"
      "\"gb_per_s\":%.1f,"
      "\"checked\":true}\n",
      kBitsPerDim, static_cast<long long>(kHeads * kTokens), static_cast<long long>(kKeyBytes), us,
      static_cast<double>(kKeyBytes) / us / 1e3);
  return absl::OkStatus();
}

}  // namespace
}  // namespace spillway::cuda

int main() {
  const absl::Status status = spillway::cuda::Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "encode_bench: %s\n", std::string(status.message()).c_str());
  return 1;
}

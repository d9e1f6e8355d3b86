// Measures how the GPU encodes full pages: how many bytes of keys per second, including the norms,
// with rows in GPU memory and in pinned host memory; the time for the pages that a decode step
// fills; and the time for the first pages of a sequence. Before this, random pages are compared
// with those that the CPU encodes. Prints one JSON object per line.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <span>
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
#include "host/cpu/page_encoder.h"

namespace spillway::cuda {
namespace {

constexpr int kHeadDim = 128;
constexpr int kBitsPerDim = HashSpec().bits_per_dim;
constexpr int kHeads = 8;
constexpr int64_t kLongTokens = 65536;  // per head, after the first pages
constexpr int64_t kTokens = kCentreTokenCount + kLongTokens;
constexpr int64_t kPages = kTokens / kPageTokenCount;
constexpr int64_t kRowBytes = 2 * kHeadDim * 2;
constexpr int64_t kPageBytes = kPageTokenCount * kRowBytes;
constexpr int kCheckedPages = 40;
constexpr int kWarmUps = 3;
constexpr int kRuns = 20;

// Allocates memory that kernels can read, and copies the data to it.
template <typename Memory>
absl::StatusOr<Memory> Upload(const void* data, int64_t bytes, MemoryBudget& budget) {
  ASSIGN_OR_RETURN(Memory memory, Memory::Create(bytes, &budget, "the benchmark"));
  SPILLWAY_CUDA_RETURN_IF_ERROR(CopyToGpu(memory.data(), data, static_cast<size_t>(bytes)));
  return memory;
}
template <typename T>
absl::StatusOr<DeviceBuffer> Upload(const std::vector<T>& values, MemoryBudget& budget) {
  return Upload<DeviceBuffer>(values.data(), static_cast<int64_t>(values.size() * sizeof(T)),
                              budget);
}

ModelSpec Spec() {
  ModelSpec spec;
  spec.layer_count = 1;
  spec.query_head_count = spec.kv_head_count = kHeads;
  spec.head_dim = kHeadDim;
  spec.dtype = DType::kBF16;
  spec.hash = {.kind = HashKind::kRotation, .bits_per_dim = kBitsPerDim};
  return spec;
}

// Converts a page of codes from the GPU's layout to the CPU's.
std::vector<std::byte> AsOnCpu(const CodeTiling& tiling, const CodeLayout& layout,
                               const std::byte* gpu_page) {
  std::vector<std::byte> page(layout.page_bytes());
  const auto* words = reinterpret_cast<const uint32_t*>(gpu_page);
  for (int slot = 0; slot < kPageTokenCount; ++slot) {
    uint8_t levels[kHeadDim] = {};
    for (int plane = 0; plane < tiling.planes; ++plane) {
      for (int j = 0; j < kHeadDim; ++j) {
        const uint32_t word = words[tiling.word_offset(plane, slot, j / 32)];
        levels[j] |= static_cast<uint8_t>((word >> (j % 32) & 1) << plane);
      }
    }
    StoreCode(layout, levels, page.data(), slot);
    const int at = CodeTiling::factor_index(slot);
    std::memcpy(page.data() + layout.factor_offset_bytes() + slot * 2,
                gpu_page + tiling.factor_offset_bytes() + at * 2, 2);
    page[layout.norm_offset_bytes() + slot] = gpu_page[tiling.norm_offset_bytes() + at];
  }
  std::memcpy(page.data() + layout.centre_offset_bytes(), gpu_page + tiling.centre_offset_bytes(),
              2 * kHeadDim);
  return page;
}

// Compares random pages with those that the CPU encodes.
absl::Status CheckPages(const std::vector<uint16_t>& rows, const std::vector<std::byte>& codes,
                        const CodeTiling& tiling, const EncodeParams& params) {
  const ModelSpec spec = Spec();
  const auto row_page = [&](int64_t head, int64_t page) {
    return reinterpret_cast<const std::byte*>(rows.data()) + (head * kPages + page) * kPageBytes;
  };
  std::mt19937_64 random(7);
  for (int64_t head = 0; head < kHeads; ++head) {
    std::vector<float> radii(kCentreTokenCount);
    std::vector<PageValues> first_pages;
    std::vector<std::byte> page(params.layout.page_bytes());
    for (int64_t p = 0; p < kFirstPageCount; ++p) {
      EncodePage(spec, params, row_page(head, p), page.data(), radii.data() + p * kPageTokenCount);
      first_pages.push_back(MeasureValues(spec, row_page(head, p)));
    }
    const FirstRows first = MeasureFirstRows(first_pages, radii.data());
    for (int n = 0; n < kCheckedPages / kHeads; ++n) {
      const auto p = static_cast<int64_t>(random() % kPages);
      EncodePage(spec, params, row_page(head, p), page.data(), radii.data());
      WriteNorms(params.layout, first, MeasureValues(spec, row_page(head, p)), radii.data(),
                 page.data());
      if (AsOnCpu(tiling, params.layout,
                  codes.data() + (head * kPages + p) * tiling.page_bytes()) != page) {
        return absl::InternalError("page " + std::to_string(p) + " of head " +
                                   std::to_string(head) + " is not the CPU's");
      }
    }
  }
  return absl::OkStatus();
}

// The median time of the work that `enqueue` puts on the stream.
template <typename Enqueue>
absl::StatusOr<double> MedianUs(const Stream& stream, Enqueue enqueue) {
  ASSIGN_OR_RETURN(const Event start, Event::Create(/*timing=*/true));
  ASSIGN_OR_RETURN(const Event stop, Event::Create(/*timing=*/true));
  std::vector<float> times_ms;
  for (int run = 0; run < kWarmUps + kRuns; ++run) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventRecord(start.get(), stream.get()));
    SPILLWAY_CUDA_RETURN_IF_ERROR(enqueue());
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventRecord(stop.get(), stream.get()));
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventSynchronize(stop.get()));
    float ms = 0;
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventElapsedTime(&ms, start.get(), stop.get()));
    if (run >= kWarmUps) times_ms.push_back(ms);
  }
  std::sort(times_ms.begin(), times_ms.end());
  return 1e3 * (times_ms[kRuns / 2 - 1] + times_ms[kRuns / 2]) / 2;
}

void Print(const char* name, const char* rows, int64_t tokens, double us) {
  const int64_t key_bytes = tokens * kHeadDim * 2;
  std::printf(
      "{\"name\":\"%s\",\"rows\":\"%s\",\"bits_per_dim\":%d,\"tokens\":%lld,\"key_bytes\":%lld,"
      "\"us\":%.1f,\"gb_per_s\":%.1f,\"checked\":true}\n",
      name, rows, kBitsPerDim, static_cast<long long>(tokens), static_cast<long long>(key_bytes),
      us, static_cast<double>(key_bytes) / us / 1e3);
}

absl::Status Run() {
  MemoryBudget budget(std::numeric_limits<int64_t>::max());
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  // Random bf16 numbers, truncated instead of rounded.
  std::vector<uint16_t> rows(kHeads * kTokens * (kRowBytes / 2));
  for (uint16_t& element : rows) {
    const float x = normal(random);
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    element = static_cast<uint16_t>(bits >> 16);
  }
  const ModelSpec spec = Spec();
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
  const auto row_bytes = static_cast<int64_t>(rows.size() * sizeof(rows[0]));
  ASSIGN_OR_RETURN(const DeviceBuffer device_rows,
                   Upload<DeviceBuffer>(rows.data(), row_bytes, budget));
  ASSIGN_OR_RETURN(const PinnedBuffer pinned_rows,
                   Upload<PinnedBuffer>(rows.data(), row_bytes, budget));
  ASSIGN_OR_RETURN(const DeviceBuffer device_codes, Upload(codes, budget));
  ASSIGN_OR_RETURN(const DeviceBuffer device_rotation, Upload(transposed, budget));
  ASSIGN_OR_RETURN(const DeviceBuffer statistics,
                   Upload(std::vector<HeadStatistics>(kHeads, HeadStatistics{}), budget));
  ASSIGN_OR_RETURN(const DeviceBuffer value_centres,
                   Upload(std::vector<float>(kHeads * kHeadDim), budget));
  const int64_t scratch_bytes = kHeads * FirstPagesScratchBytes(kHeadDim);
  ASSIGN_OR_RETURN(const DeviceBuffer scratch,
                   DeviceBuffer::Create(scratch_bytes, &budget, "the benchmark"));
  std::vector<const std::byte*> row_page_list[2];
  std::vector<std::byte*> code_page_list;
  for (int64_t p = 0; p < kHeads * kPages; ++p) {
    row_page_list[0].push_back(device_rows.data() + p * kPageBytes);
    row_page_list[1].push_back(pinned_rows.data() + p * kPageBytes);
    code_page_list.push_back(device_codes.data() + p * tiling.page_bytes());
  }
  ASSIGN_OR_RETURN(const DeviceBuffer code_pages, Upload(code_page_list, budget));
  ASSIGN_OR_RETURN(const Stream stream, Stream::Create());

  EncodeWork work;
  work.dtype = DType::kBF16;
  work.head_dim = kHeadDim;
  work.kv_head_count = kHeads;
  work.row_bytes = kRowBytes;
  work.row_page_capacity = kPages;
  work.code_pages = reinterpret_cast<std::byte* const*>(code_pages.data());
  work.code_page_capacity = kPages;
  work.tiling = tiling;
  RotationWeights weights;
  weights.bits_per_dim = kBitsPerDim;
  weights.transposed = reinterpret_cast<const float*>(device_rotation.data());
  const HeadIndex heads{reinterpret_cast<HeadStatistics*>(statistics.data()),
                        reinterpret_cast<float*>(value_centres.data())};
  for (const bool pinned : {false, true}) {
    const char* const where = pinned ? "pinned" : "gpu";
    ASSIGN_OR_RETURN(const DeviceBuffer row_pages, Upload(row_page_list[pinned], budget));
    work.row_pages = reinterpret_cast<const std::byte* const*>(row_pages.data());
    // The copies above ran on another stream, so wait for them.
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaDeviceSynchronize());
    const auto encode_first = [&] {
      return LaunchEncodeFirstPages(work, weights, heads, scratch.data(), scratch_bytes,
                                    stream.get());
    };
    const auto encode = [&](int64_t begin, int64_t end) {
      EncodeWork part = work;
      part.begin = begin;
      part.end = end;
      return LaunchEncodePages(part, weights, heads, stream.get());
    };
    SPILLWAY_CUDA_RETURN_IF_ERROR(
        cudaMemset(device_codes.data(), 0xCD, static_cast<size_t>(device_codes.bytes())));
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaDeviceSynchronize());
    SPILLWAY_CUDA_RETURN_IF_ERROR(encode_first());
    SPILLWAY_CUDA_RETURN_IF_ERROR(encode(kCentreTokenCount, kTokens));
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream.get()));
    SPILLWAY_CUDA_RETURN_IF_ERROR(
        cudaMemcpy(codes.data(), device_codes.data(), codes.size(), cudaMemcpyDeviceToHost));
    RETURN_IF_ERROR(CheckPages(rows, codes, tiling, params));

    ASSIGN_OR_RETURN(const double long_us,
                     MedianUs(stream, [&] { return encode(kCentreTokenCount, kTokens); }));
    Print("encode", where, kHeads * kLongTokens, long_us);
    ASSIGN_OR_RETURN(const double page_us, MedianUs(stream, [&] {
                       return encode(kCentreTokenCount, kCentreTokenCount + kPageTokenCount);
                     }));
    Print("encode one page", where, kHeads * kPageTokenCount, page_us);
    ASSIGN_OR_RETURN(const double first_us, MedianUs(stream, encode_first));
    Print("encode first pages", where, kHeads * kCentreTokenCount, first_us);
  }
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

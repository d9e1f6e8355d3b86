// How fast scattered rows come from pinned host memory, by their size and by where they begin: one
// JSON object a line. The kernel gathers as the engine's does (gpu/kernels/gather.cuh), and every
// row that it brings is compared with its source.
//
//   build/release/bench/gpu/row-strides > strides.jsonl
#include <cuda_runtime.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda/ptx>
#include <random>
#include <thread>
#include <vector>

namespace ptx = ::cuda::ptx;

namespace {

constexpr int kWarps = 8;
constexpr int kStages = 4;
constexpr int kStageBytes = 4096;
constexpr int kSharedBytes = kWarps * kStages * kStageBytes;
constexpr int64_t kSequenceTokens = 65536;
constexpr int64_t kHeads = 8;

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "row-strides: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

struct Ring {
  uint64_t barriers[kStages];
  unsigned char* targets[kStages][32];
};

// The bytes that are read for a row: from one multiple of `align` to another.
struct Cover {
  const unsigned char* from;
  unsigned bytes;
};
__host__ __device__ Cover CoverOf(const unsigned char* row, int row_bytes, int align) {
  const auto at = reinterpret_cast<uint64_t>(row);
  const uint64_t begin = at / align * align;
  const uint64_t end = (at + row_bytes + align - 1) / align * align;
  return {reinterpret_cast<const unsigned char*>(begin), static_cast<unsigned>(end - begin)};
}

// slot: bytes of shared memory for a row.
__global__ void __launch_bounds__(kWarps * 32, 1)
    GatherKernel(const unsigned char* const* rows, int count, int row_bytes, int align, int slot,
                 unsigned char* out) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char rings[];
  __shared__ Ring states[kWarps];
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  Ring& state = states[warp];
  if (lane == 0) {
    for (int s = 0; s < kStages; ++s) ptx::mbarrier_init(&state.barriers[s], 1);
    ptx::fence_proxy_async(ptx::space_shared);
  }
  __syncthreads();
  const int run_rows = min(32, kStageBytes / slot);
  const int runs = (count + run_rows - 1) / run_rows;
  const int first = blockIdx.x * kWarps + warp;
  const int step = gridDim.x * kWarps;
  const int own = first < runs ? (runs - first + step - 1) / step : 0;
  unsigned char* const ring = rings + warp * kStages * kStageBytes;
  const auto row_of = [&](int i) { return (first + i * step) * run_rows + lane; };
  const auto fill = [&](int i) {
    const int s = i % kStages;
    const bool there = lane < run_rows && row_of(i) < count;
    const Cover cover = there ? CoverOf(rows[row_of(i)], row_bytes, align) : Cover{nullptr, 0};
    const unsigned total = __reduce_add_sync(0xFFFFFFFFu, cover.bytes);
    state.targets[s][lane] = there ? out + size_t(row_of(i)) * row_bytes : nullptr;
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared,
                                     &state.barriers[s], total);
    }
    __syncwarp();
    if (there) {
      ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global,
                         ring + s * kStageBytes + lane * slot, cover.from, cover.bytes,
                         &state.barriers[s]);
    }
  };
  for (int i = 0; i < min(own, kStages); ++i) fill(i);
  for (int i = 0; i < own; ++i) {
    const int s = i % kStages;
    while (!ptx::mbarrier_try_wait_parity(&state.barriers[s], i / kStages % 2)) {
    }
    if (state.targets[s][lane] != nullptr) {
      const auto skipped = static_cast<int>(reinterpret_cast<uint64_t>(rows[row_of(i)]) % align);
      ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, state.targets[s][lane],
                         ring + s * kStageBytes + lane * slot + skipped, row_bytes);
    }
    ptx::cp_async_bulk_commit_group();
    if (i > 0 && i - 1 + kStages < own) {
      ptx::cp_async_bulk_wait_group_read(ptx::n32_t<1>{});
      __syncwarp();
      fill(i - 1 + kStages);
    }
  }
  ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{});
#endif
}

struct Case {
  int row_bytes;
  int stride;
  int align;  // whole pieces of so many bytes are read
};
constexpr Case kCases[] = {{512, 512, 16}, {304, 304, 16}, {304, 304, 32}, {304, 304, 64},
                           {320, 320, 16}, {384, 384, 16}, {256, 256, 16}, {288, 288, 16}};
constexpr int kBlocks[] = {4, 8, 16};

}  // namespace

int main() {
  constexpr size_t kSpan = size_t{5} << 30;
  constexpr size_t kHuge = size_t{2} << 20;
  void* const mapped =
      mmap(nullptr, kSpan + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    std::fprintf(stderr, "row-strides: needs 5 GiB of memory\n");
    return 1;
  }
  auto* const base = reinterpret_cast<unsigned char*>(
      (reinterpret_cast<uint64_t>(mapped) + kHuge - 1) / kHuge * kHuge);
  madvise(base, kSpan, MADV_HUGEPAGE);
  std::vector<std::thread> writers;
  constexpr size_t kParts = 16;
  for (size_t part = 0; part < kParts; ++part) {
    writers.emplace_back([=] {
      auto* const words = reinterpret_cast<uint64_t*>(base + kSpan / kParts * part);
      for (size_t i = 0; i < kSpan / kParts / 8; ++i) {
        words[i] = (part << 40 | i) * 0x9E3779B97F4A7C15u;
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  Check(cudaHostRegister(base, kSpan, cudaHostRegisterDefault), "cudaHostRegister");
  Check(
      cudaFuncSetAttribute(GatherKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
      "cudaFuncSetAttribute");
  cudaDeviceProp properties;
  Check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  unsigned char* out = nullptr;
  const unsigned char** device_rows = nullptr;
  constexpr int64_t kRowsMax = 170000;
  Check(cudaMalloc(&out, kRowsMax * 512), "cudaMalloc");
  Check(cudaMalloc(&device_rows, kRowsMax * sizeof(void*)), "cudaMalloc");
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin), "cudaEventCreate");
  Check(cudaEventCreate(&end), "cudaEventCreate");
  for (const int sequences : {1, 16}) {
    for (const double density : {0.004, 0.02}) {
      for (const Case& c : kCases) {
        std::mt19937_64 random(7);
        const int slot = c.align == 16 ? c.row_bytes : (c.row_bytes / c.align + 2) * c.align;
        float best[3] = {1e9, 1e9, 1e9};
        for (int repetition = 0; repetition < 6; ++repetition) {
          std::vector<const unsigned char*> rows;
          for (int64_t i = 0; i < sequences * kHeads * kSequenceTokens; ++i) {
            if (static_cast<double>(random() >> 11) * 0x1p-53 >= density) continue;
            rows.push_back(base + i * c.stride);
          }
          const auto count = static_cast<int>(std::min<int64_t>(rows.size(), kRowsMax));
          Check(cudaMemcpy(device_rows, rows.data(), count * sizeof(void*), cudaMemcpyDefault),
                "cudaMemcpy");
          for (int b = 0; b < 3; ++b) {
            Check(cudaEventRecord(begin), "cudaEventRecord");
            GatherKernel<<<kBlocks[b], kWarps * 32, kSharedBytes>>>(device_rows, count, c.row_bytes,
                                                                    c.align, slot, out);
            Check(cudaEventRecord(end), "cudaEventRecord");
            Check(cudaEventSynchronize(end), "the gather");
            float ms = 0;
            Check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
            // The first repetition warms up.
            if (repetition > 0) best[b] = std::min(best[b], ms * 1e6f / static_cast<float>(count));
          }
          if (repetition > 0) continue;
          std::vector<unsigned char> there(size_t(count) * c.row_bytes);
          Check(cudaMemcpy(there.data(), out, there.size(), cudaMemcpyDefault), "cudaMemcpy");
          for (int i = 0; i < count; ++i) {
            if (std::memcmp(there.data() + size_t(i) * c.row_bytes, rows[i], c.row_bytes) == 0) {
              continue;
            }
            std::fprintf(stderr, "row-strides: row %d arrived with other bytes\n", i);
            return 1;
          }
        }
        std::printf(
            "{\"gpu\": \"%s\", \"sequences\": %d, \"density\": %g, \"row_bytes\": %d, "
            "\"stride\": %d, \"whole_pieces_of\": %d, \"ns_per_row\": {\"4\": %.2f, \"8\": %.2f, "
            "\"16\": %.2f}}\n",
            properties.name, sequences, density, c.row_bytes, c.stride, c.align, best[0], best[1],
            best[2]);
        std::fflush(stdout);
      }
    }
  }
  return 0;
}

// Measures how many bytes of rows [K | V] the CPU encodes per second, with all cores and including
// the norms: pages of one KV head each, head_dim 128, float16. Encoding the codes again after a
// restart cannot be faster than this (bench/arena.py). The codes of each run are compared with
// those of the first run. Prints one JSON object.
#include <tbb/parallel_for.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstring>
#include <iostream>
#include <random>
#include <vector>

#include "host/codes/rotation.h"
#include "host/core/page_index.h"
#include "host/cpu/page_encoder.h"
#include "nlohmann/json.hpp"

namespace spillway::bench {
namespace {

constexpr int kHeadDim = 128;
constexpr int64_t kRowBytes = 2 * kHeadDim * 2;
constexpr int64_t kPageBytes = kPageTokenCount * kRowBytes;

int Run(int64_t page_count, int repetitions) {
  ModelSpec spec;
  spec.layer_count = spec.query_head_count = spec.kv_head_count = 1;
  spec.head_dim = kHeadDim;
  spec.dtype = DType::kF16;
  spec.hash = {.kind = HashKind::kRotation, .bits_per_dim = HashSpec().bits_per_dim};
  const std::vector<float> rotation = MakeRotation(kHeadDim, 42, 0);
  std::vector<float> transposed(rotation.size());
  for (int i = 0; i < kHeadDim; ++i) {
    for (int j = 0; j < kHeadDim; ++j) transposed[i * kHeadDim + j] = rotation[j * kHeadDim + i];
  }
  EncodeParams params;
  params.head_dim = kHeadDim;
  params.bits_per_dim = spec.hash.bits_per_dim;
  params.layout = CodeLayout::Of(spec);
  params.rotation = rotation.data();
  params.rotation_transposed = transposed.data();

  // Random float16 numbers of both signs, with absolute values in [1/1024, 2).
  std::vector<uint16_t> rows(static_cast<size_t>(page_count * kPageBytes / 2));
  std::mt19937 random(1);
  for (uint16_t& element : rows) {
    const auto bits = static_cast<uint16_t>(random());
    element = static_cast<uint16_t>((bits & 0x83FF) | (5 + (bits >> 10) % 11) << 10);
  }
  const auto* const bytes = reinterpret_cast<const std::byte*>(rows.data());
  const auto page_of = [&](int64_t page) { return bytes + page * kPageBytes; };

  std::vector<float> radii(kCentreTokenCount);
  std::vector<PageValues> first_pages;
  std::vector<std::byte> first_codes(params.layout.page_bytes());
  for (int64_t p = 0; p < kFirstPageCount; ++p) {
    EncodePage(spec, params, page_of(p), first_codes.data(), radii.data() + p * kPageTokenCount);
    first_pages.push_back(MeasureValues(spec, page_of(p)));
  }
  const FirstRows first = MeasureFirstRows(first_pages, radii.data());

  const auto code_bytes = static_cast<int64_t>(params.layout.page_bytes());
  std::vector<std::byte> codes(static_cast<size_t>(page_count * code_bytes)), expected;
  std::vector<double> seconds;
  for (int run = 0; run <= repetitions; ++run) {
    std::fill(codes.begin(), codes.end(), std::byte{0});
    const auto begin = std::chrono::steady_clock::now();
    tbb::parallel_for(int64_t{0}, page_count, [&](int64_t page) {
      float page_radii[kPageTokenCount];
      std::byte* const code = codes.data() + page * code_bytes;
      EncodePage(spec, params, page_of(page), code, page_radii);
      WriteNorms(params.layout, first, MeasureValues(spec, page_of(page)), page_radii, code);
    });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (run == 0) {
      expected = codes;
    } else {
      seconds.push_back(took.count());
      if (codes != expected) {
        std::cerr << "encode_bench: other codes in run " << run << "\n";
        return 1;
      }
    }
  }
  std::sort(seconds.begin(), seconds.end());
  const double row_gb = static_cast<double>(page_count * kPageBytes) / 1e9;
  const nlohmann::ordered_json found = {{"row_bytes", page_count * kPageBytes},
                                        {"repetitions", repetitions},
                                        {"gb_s", row_gb / seconds[seconds.size() / 2]},
                                        {"gb_s_min", row_gb / seconds.back()},
                                        {"gb_s_max", row_gb / seconds.front()}};
  std::cout << found << std::endl;
  return 0;
}

}  // namespace
}  // namespace spillway::bench

int main(int argc, char** argv) {
  CLI::App app{"The CPU's encoder on all cores."};
  int64_t page_count = 16384;
  int repetitions = 7;
  app.add_option("--pages", page_count, "pages of 128 rows")->check(CLI::Range(64, 1 << 20));
  app.add_option("--repetitions", repetitions)->check(CLI::Range(1, 1000));
  CLI11_PARSE(app, argc, argv);
  return spillway::bench::Run(page_count, repetitions);
}

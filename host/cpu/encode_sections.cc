#include "host/cpu/encode_sections.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "host/base/elements.h"
#include "host/core/sketch.h"
#include "host/cpu/kernels.h"

namespace spillway {
namespace {

// Four bits of each of the elements x[channel[i]] at a token's place of a
// sketch or of labels.
void StoreSketch(const float* x, const uint16_t* channels, int count, int slot,
                 std::byte* section) {
  auto* words = reinterpret_cast<uint32_t*>(section) + slot;
  float min = std::numeric_limits<float>::infinity();
  float max = -min;
  for (int i = 0; i < count; ++i) {
    min = std::min(min, x[channels[i]]);
    max = std::max(max, x[channels[i]]);
  }
  const SketchRange range = SketchRange::Of(min, max);
  for (int w = 0; w < count / 8; ++w) {
    uint32_t word = 0;
    for (int i = 0; i < 8; ++i) word |= range.Code(x[channels[8 * w + i]]) << (4 * i);
    words[w * kPageTokenCount] = word;
  }
  words[count / 8 * kPageTokenCount] = range.Pack();
}

void StoreBounds(const ModelSpec& spec, const KeySections& sections, const std::byte* rows,
                 int begin, int end, std::byte* section) {
  const int d = spec.head_dim;
  const int pages = sections.bound_pages;
  const int tokens = static_cast<int>(sections.bound_page_tokens());
  const int bytes = sections.element_bytes;
  std::vector<float> x(d), low(d), high(d);
  for (int page = begin / tokens; page * tokens < end; ++page) {
    std::fill(low.begin(), low.end(), std::numeric_limits<float>::infinity());
    std::fill(high.begin(), high.end(), -std::numeric_limits<float>::infinity());
    for (int t = page * tokens; t < std::min(end, (page + 1) * tokens); ++t) {
      ToFloat(spec.dtype, rows + t * spec.row_bytes(), d, x.data());
      for (int i = 0; i < d; ++i) {
        low[i] = std::min(low[i], x[i]);
        high[i] = std::max(high[i], x[i]);
      }
    }
    for (int i = 0; i < d; ++i) {
      FromFloat(spec.dtype, &low[i], 1, section + int64_t{i * pages + page} * bytes);
      FromFloat(spec.dtype, &high[i], 1, section + int64_t{(d + i) * pages + page} * bytes);
    }
  }
}

}  // namespace

void LshBuckets(const CpuModel& model, int layer, const float* x, uint16_t* buckets) {
  const KeyIndexSpec& indices = model.spec().indices;
  std::vector<float> y(static_cast<size_t>(indices.lsh_table_count) * indices.lsh_bits);
  LinearMap(x, model.spec().head_dim, model.projections(layer), static_cast<int>(y.size()),
            y.data());
  for (int t = 0; t < indices.lsh_table_count; ++t) {
    uint32_t name = 0;
    for (int b = 0; b < indices.lsh_bits; ++b) {
      name |= static_cast<uint32_t>(y[t * indices.lsh_bits + b] > 0) << b;
    }
    buckets[t] = static_cast<uint16_t>(name);
  }
}

void EncodeSections(const CpuModel& model, int layer, int kv_head, const std::byte* rows, int begin,
                    int end, const float* centre, std::byte* sections) {
  const ModelSpec& spec = model.spec();
  const KeySections& at = model.sections();
  const int d = spec.head_dim;
  std::vector<uint16_t> all(d);
  std::iota(all.begin(), all.end(), uint16_t{0});
  std::vector<float> x(d);
  std::vector<uint16_t> buckets(at.tables);
  for (int t = begin; t < end; ++t) {
    ToFloat(spec.dtype, rows + t * spec.row_bytes(), d, x.data());
    if (at.sketch_channels > 0) StoreSketch(x.data(), all.data(), d, t, sections + at.sketch());
    if (at.label_channels > 0) {
      StoreSketch(x.data(), model.channels(layer) + kv_head * at.label_channels, at.label_channels,
                  t, sections + at.labels());
    }
    if (at.tables == 0) continue;
    for (int i = 0; i < d; ++i) x[i] -= centre[i];
    LshBuckets(model, layer, x.data(), buckets.data());
    auto* to = reinterpret_cast<uint16_t*>(sections + at.buckets()) + t;
    for (int i = 0; i < at.tables; ++i) to[i * kPageTokenCount] = buckets[i];
  }
  if (at.bound_pages > 0) {
    StoreBounds(spec, at, rows, begin, end, sections + at.bounds());
  }
}

}  // namespace spillway

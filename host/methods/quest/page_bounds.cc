#include "host/methods/quest/page_bounds.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "host/base/elements.h"
#include "host/methods/int4_keys/int4_range.h"
#include "host/methods/weights/key_sections.h"

namespace spillway {

void StoreBounds(const ModelSpec& spec, const PageKeys& keys, std::byte* section) {
  const KeySections sections = KeySections::Of(spec);
  const int d = spec.head_dim;
  const int pages = sections.bound_pages;
  const int tokens = static_cast<int>(sections.bound_page_tokens());
  const int bytes = sections.element_bytes;
  std::vector<float> x(d), low(d), high(d);
  for (int page = keys.begin / tokens; page * tokens < keys.end; ++page) {
    std::fill(low.begin(), low.end(), std::numeric_limits<float>::infinity());
    std::fill(high.begin(), high.end(), -std::numeric_limits<float>::infinity());
    for (int t = page * tokens; t < std::min(keys.end, (page + 1) * tokens); ++t) {
      ToFloat(spec.dtype, keys.rows + t * spec.row_bytes(), d, x.data());
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

void BoundLogits(DType dtype, const RowQueries& queries, int page_count, const std::byte* section,
                 float* logits) {
  constexpr int kPagesMax = 8;
  const int d = queries.head_dim;
  float bounds[2 * kHeadDimMax * kPagesMax];
  ToFloat(dtype, section, int64_t{2} * d * page_count, bounds);
  const int64_t page_tokens = kPageTokenCount / page_count;
  for (int h = 0; h < queries.head_count; ++h) {
    float sums[kPagesMax] = {};
    for (int i = 0; i < d; ++i) {
      const float q = queries.scaled[h * d + i];
      for (int p = 0; p < page_count; ++p) {
        const float a = q * bounds[i * page_count + p];
        const float b = q * bounds[(d + i) * page_count + p];
        sums[p] += a > b ? a : b;
      }
    }
    for (int p = 0; p < page_count; ++p) {
      std::fill_n(logits + h * kPageTokenCount + p * page_tokens, page_tokens,
                  CutEstimate(sums[p]));
    }
  }
}

}  // namespace spillway

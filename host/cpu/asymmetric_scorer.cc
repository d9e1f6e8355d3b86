#include "host/cpu/asymmetric_scorer.h"

#include <algorithm>
#include <cmath>

#include "host/core/quantiser.h"
#include "host/core/query_code.h"
#include "host/cpu/logit_scorer.h"

namespace spillway {

absl::Status AsymmetricScorer::Prepare() {
  const ModelSpec& spec = keys_.spec();
  const int d = spec.head_dim;
  const EncodeParams params = keys_.model().encode_params(keys_.context->layer);
  query_.layout = params.layout;
  query_.row_count = spec.group();
  const int dims = query_.layout.dims;
  weights_.assign(static_cast<size_t>(spec.group()) * dims, 0);
  query_.weights = weights_.data();
  std::vector<float> rotated(d);
  for (int g = 0; g < spec.group(); ++g) {
    Rotate(params, keys_.queries->raw() + g * d, rotated.data());
    float largest = 0;
    for (float x : rotated) largest = std::max(largest, std::fabs(x));
    const float step = QueryStep(largest);
    int32_t weight_sum = 0;
    for (int j = 0; j < d && step > 0; ++j) {
      const int weight = QueryWeight(QueryLevel(rotated[j], step));
      weights_[static_cast<size_t>(g) * dims + j] = static_cast<int8_t>(2 * weight);
      weight_sum += weight;
    }
    query_.offset[g] = QueryOffset(spec.hash.bits_per_dim, weight_sum);
    query_.coefficient[g] = QueryCoefficient(static_cast<float>(spec.softmax_scale), step,
                                             QuantiserStep(spec.hash.bits_per_dim));
  }
  return FindReferences(
      keys_,
      [&](int64_t page, int64_t next, float* logits) {
        AsymmetricLogits(query_, {keys_.IndexPage(page), keys_.IndexPage(next)}, logits);
        return absl::OkStatus();
      },
      query_.references);
}

absl::Status AsymmetricScorer::Bins(int64_t page, int tile_begin, int tile_end, uint16_t* bins,
                                    uint16_t* const* head_bins) const {
  AsymmetricBins(query_, {keys_.IndexPage(page), keys_.IndexPage(page + 1)}, tile_begin, tile_end,
                 bins, head_bins);
  return absl::OkStatus();
}

}  // namespace spillway

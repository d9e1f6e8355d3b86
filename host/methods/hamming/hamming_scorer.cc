#include "host/methods/hamming/hamming_scorer.h"

#include "host/methods/hamming/hamming.h"
#include "host/methods/hamming/hamming_bins.h"
#include "host/methods/hamming/mlp_index.h"

namespace spillway {

HammingScorer::HammingScorer(const ScoredKeys& keys) : keys_(keys) {
  // The codes of a rotation are at the beginning of an index page; those of MLPs are in a section.
  if (keys.spec().hash.kind == HashKind::kMlp) {
    offset_bytes_ = keys.model().IndexOf(kHammingMethod).offset_bytes;
  }
}

void HammingScorer::CountMlpBits(std::vector<int>& ones) const {
  const ModelSpec& spec = keys_.spec();
  const auto& index = static_cast<const MlpIndex&>(*keys_.model().IndexOf(kHammingMethod).index);
  std::vector<uint32_t> code(spec.hash.hash_bits / 32);
  for (int g = 0; g < spec.group(); ++g) {
    index.QueryCode(keys_.context->layer, keys_.kv_head, g,
                    keys_.queries->raw() + g * spec.head_dim, code.data());
    int* const of_code = ones.data() + g / spec.heads_per_code() * spec.hash.hash_bits;
    for (int j = 0; j < spec.hash.hash_bits; ++j) of_code[j] += (code[j / 32] >> (j % 32)) & 1u;
  }
}

void HammingScorer::CountRotationBits(std::vector<int>& ones) const {
  const ModelSpec& spec = keys_.spec();
  const EncodeParams params = keys_.model().encode_params(keys_.context->layer);
  std::vector<float> rotated(spec.head_dim);
  for (int g = 0; g < spec.group(); ++g) {
    Rotate(params, keys_.queries->raw() + g * spec.head_dim, rotated.data());
    // As in the codes of keys, zero counts as positive.
    for (int j = 0; j < spec.plane_bits(); ++j) ones[j] += rotated[j] >= 0 ? 1 : 0;
  }
}

absl::Status HammingScorer::Prepare() {
  const ModelSpec& spec = keys_.spec();
  const int words = spec.plane_words();
  const int heads = spec.heads_per_code();
  std::vector<int> ones(words * 32, 0);  // per bit: number of query heads with a 1
  if (spec.hash.kind == HashKind::kMlp) {
    CountMlpBits(ones);
  } else {
    CountRotationBits(ones);
  }
  // matches = sum_j (k_j ? c_j : heads - c_j), with c_j = ones[j] and k_j the bits of the key's
  // code.
  weights_.assign(words * 32, 0);
  query_.layout = CodeLayout::Of(spec);
  query_.row_count = 1;
  query_.weights = weights_.data();
  for (int j = 0; j < spec.plane_bits(); ++j) {
    weights_[j] = static_cast<int8_t>(2 * ones[j] - heads);
    query_.offset[0] += heads - ones[j];
  }
  return absl::OkStatus();
}

const std::byte* HammingScorer::Codes(int64_t page) const {
  const std::byte* index_page = keys_.IndexPage(page);
  return index_page == nullptr ? nullptr : index_page + offset_bytes_;
}

absl::Status HammingScorer::Bins(int64_t page, int tile_begin, int tile_end, uint16_t* bins,
                                 uint16_t* const*) const {
  HammingBins(query_, {Codes(page), Codes(page + 1)}, tile_begin, tile_end, bins);
  return absl::OkStatus();
}

}  // namespace spillway

#include "host/methods/hamming/mlp_index.h"

#include <utility>

#include "host/base/elements.h"
#include "host/cpu/kernels.h"

namespace spillway {
namespace {

constexpr int kHashBitsMax = 1024;

}  // namespace

MlpIndex::MlpIndex(const ModelSpec& spec, HashMlps mlps)
    : spec_(spec), layout_(CodeLayout::Of(spec)), mlps_(std::move(mlps)) {}

void MlpIndex::Encode(const PageKeys& keys, std::byte* section) const {
  const int d = spec_.head_dim;
  const int codes = spec_.key_code_count();
  float x[kHeadDimMax];
  uint32_t words[kHashBitsMax / 32];
  uint8_t bits[kHashBitsMax];
  for (int t = keys.begin; t < keys.end; ++t) {
    ToFloat(spec_.dtype, keys.rows + t * spec_.row_bytes(), d, x);
    for (int i = 0; i < d; ++i) x[i] -= keys.centre[i];
    for (int c = 0; c < codes; ++c) {
      MlpCode(mlps_.mlp[keys.layer], keys.kv_head * codes + c, x,
              words + c * spec_.hash.hash_bits / 32);
    }
    for (int j = 0; j < layout_.dims; ++j) bits[j] = (words[j / 32] >> (j % 32)) & 1u;
    StoreCode(layout_, bits, section, t);
  }
}

void MlpIndex::QueryCode(int layer, int kv_head, int g, const float* q, uint32_t* words) const {
  if (spec_.hash.query_weights) {
    MlpCode(mlps_.query_mlp[layer], kv_head * spec_.group() + g, q, words);
  } else {
    MlpCode(mlps_.mlp[layer], kv_head * spec_.key_code_count() + g / spec_.heads_per_code(), q,
            words);
  }
}

}  // namespace spillway

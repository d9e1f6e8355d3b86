#pragma once

#include <cstdint>

#include "host/cpu/code_layout.h"
#include "host/cpu/key_index.h"
#include "host/methods/weights/index_weights.h"
#include "host/model/model_spec.h"

namespace spillway {

// A model's hash MLPs, and the codes of keys that they give, in pages of CodeLayout. Thread-safe.
class MlpIndex final : public KeyIndex {
 public:
  MlpIndex(const ModelSpec& spec, HashMlps mlps);

  int64_t bytes() const override { return mlps_.bytes(); }
  void Encode(const PageKeys& keys, std::byte* section) const override;
  // Computes the code of query head g of a KV head's group: words [hash_bits / 32]. It is compared
  // with code g / heads_per_code() of the keys. q: [d].
  void QueryCode(int layer, int kv_head, int g, const float* q, uint32_t* words) const;

 private:
  const ModelSpec spec_;
  const CodeLayout layout_;
  const HashMlps mlps_;
};

}  // namespace spillway

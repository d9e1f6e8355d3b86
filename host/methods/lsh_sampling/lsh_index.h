#pragma once

#include <vector>

#include "host/cpu/key_index.h"
#include "host/device/cancel.h"
#include "host/model/model_spec.h"

namespace spillway {

// The LSH buckets of keys (KeySections), and the projections from which they are computed.
// Thread-safe.
class LshIndex final : public KeyIndex {
 public:
  // cancel: as in CpuMethod::make_index.
  LshIndex(const ModelSpec& spec, const CancelToken* cancel);

  int64_t bytes() const override;
  void Encode(const PageKeys& keys, std::byte* section) const override;
  // Computes the buckets of one vector x [d]: buckets [lsh_table_count].
  void Buckets(int layer, const float* x, uint16_t* buckets) const;

 private:
  const ModelSpec spec_;
  std::vector<std::vector<float>> projections_;  // per layer, see MakeProjections()
};

}  // namespace spillway

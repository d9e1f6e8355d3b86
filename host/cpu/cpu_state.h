#pragma once

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "host/codes/key_sections.h"
#include "host/codes/mlp.h"
#include "host/cpu/code_layout.h"
#include "host/cpu/kernels.h"
#include "host/device/device.h"
#include "host/memory/page_pool.h"
#include "host/memory/page_table.h"

namespace spillway {

// A model's hash weights and the pool of its index pages: codes and what
// stands behind them.
class CpuModel final : public DeviceModel {
 public:
  CpuModel(const ModelSpec& spec, Arena* arena, IndexWeights weights);
  // What bytes() of a model is at most, before it is made.
  static int64_t BytesOf(const ModelSpec& spec);

  const ModelSpec& spec() const override { return spec_; }
  int64_t bytes() const override;

  const CodeLayout& layout() const { return layout_; }
  const KeySections& sections() const { return sections_; }
  PagePool* code_pool() const { return code_pool_.get(); }
  const MlpLayer& mlp(int layer) const { return weights_.mlp[layer]; }
  const MlpLayer& query_mlp(int layer) const {
    return spec_.hash.query_weights ? weights_.query_mlp[layer] : weights_.mlp[layer];
  }
  // [H_kv][label_channel_count].
  const uint16_t* channels(int layer) const { return weights_.channels[layer].data(); }
  // Random projections of the LSH tables, [d][lsh_table_count * lsh_bits].
  const float* projections(int layer) const { return projections_[layer].data(); }
  // Parameters of the encoder, but for the centre.
  EncodeParams encode_params(int layer) const;

 private:
  ModelSpec spec_;
  CodeLayout layout_;
  KeySections sections_;
  std::vector<std::vector<float>> rotations_;             // per layer [d][d]
  std::vector<std::vector<float>> rotations_transposed_;  // likewise
  std::vector<std::vector<float>> projections_;           // per layer
  IndexWeights weights_;
  std::unique_ptr<PagePool> code_pool_;
};

// The index of one layer of a sequence.
struct LayerIndex {
  bool centred = false;          // centre and codes exist
  int64_t token_count = 0;       // tokens that have codes
  std::vector<float> centre;     // [H_kv][d]
  std::vector<PageTable> codes;  // per KV head; pages of kPageTokenCount tokens

  // Forgets the codes of tokens at and beyond `length`, and pages that were
  // prepared for more; below kCentreTokenCount also the centre.
  void Truncate(int64_t length);
};

class CpuSequence final : public DeviceSequence {
 public:
  explicit CpuSequence(const CpuModel& model);
  CpuSequence(const CpuSequence& source, int64_t token_count);

  int64_t index_bytes() const override;
  void Truncate(int64_t token_count);
  absl::Status PrepareAppend(int layer, int64_t start, int64_t count);

  std::vector<LayerIndex> layers;  // empty for a model without an index
};

// Indexes what an append has added to a layer: all of it once the centre can
// be known, the new tokens after that. rows are committed. Parallel.
void IndexAppended(const CpuModel& model, int layer, const LayerRows& rows, LayerIndex& index);

}  // namespace spillway

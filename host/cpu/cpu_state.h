#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/cpu/code_layout.h"
#include "host/cpu/kernels.h"
#include "host/cpu/key_index.h"
#include "host/cpu/page_encoder.h"
#include "host/device/device.h"
#include "host/device/job_loops.h"
#include "host/memory/page_pool.h"
#include "host/memory/page_table.h"
#include "host/policy/method.h"

namespace spillway {

// Bytes of an index page of one KV head: the codes of a rotation, then the sections of the methods
// that the model asks for, in the order of OptionalMethods().
int64_t IndexPageBytes(const ModelSpec& spec);

// The data of an optional method for one model, and the offset of its section in an index page.
struct MethodIndex {
  const Method* method = nullptr;
  int64_t offset_bytes = 0;
  std::unique_ptr<const KeyIndex> index;
};

// A model's rotations, the data of its methods, and the pool of its index pages.
class CpuModel final : public DeviceModel {
 public:
  // safetensors and cancel: see Device::CreateModel().
  static absl::StatusOr<std::unique_ptr<CpuModel>> Create(const ModelSpec& spec, Arena* arena,
                                                          std::span<const std::byte> safetensors,
                                                          const CancelToken* cancel = nullptr);
  // Upper limit on bytes() of a model, before it is made.
  static int64_t BytesOf(const ModelSpec& spec);

  const ModelSpec& spec() const override { return spec_; }
  int64_t bytes() const override;

  // Layout of the model's codes.
  const CodeLayout& layout() const { return layout_; }
  // The transform of value codes.
  const HadamardSigns& signs() const { return signs_; }
  PagePool* code_pool() const { return code_pool_.get(); }
  // Parameters of the encoder, except the centre. For a model with a rotation.
  EncodeParams encode_params(int layer) const;
  std::span<const MethodIndex> method_indices() const { return method_indices_; }
  // REQUIRES: the model asks for the method's section.
  const MethodIndex& IndexOf(const Method& method) const;

 private:
  CpuModel(const ModelSpec& spec, Arena* arena, std::vector<MethodIndex> method_indices);
  absl::Status MakeRotations(const CancelToken* cancel);

  ModelSpec spec_;
  CodeLayout layout_;
  HadamardSigns signs_;
  std::vector<std::vector<float>> rotations_;             // per layer [d][d]
  std::vector<std::vector<float>> rotations_transposed_;  // likewise
  std::vector<MethodIndex> method_indices_;
  std::unique_ptr<PagePool> code_pool_;
};

// The index of one layer of a sequence. The codes of a rotation cover closed pages only, the
// sections of methods all tokens.
struct LayerIndex {
  int64_t token_count = 0;            // indexed tokens; 0 or at least kCentreTokenCount
  std::vector<FirstRows> first_rows;  // [H_kv] for a model with a rotation, else empty
  std::vector<float> centre;          // [H_kv][d] for methods: the mean of the first keys
  std::vector<PageTable> codes;       // per KV head: index pages of kPageTokenCount tokens

  // Statistics of the KV head; null: the model has no rotation.
  const HeadStatistics* Statistics(int kv_head) const {
    return first_rows.empty() ? nullptr : &first_rows[kv_head].statistics;
  }
  // Drops the index of tokens at and beyond `length`, and pages that were prepared for more tokens.
  // If `length` is below kCentreTokenCount, drops all of it.
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

// Indexes the tokens that an append has committed to `rows`: all tokens of the layer once there are
// kCentreTokenCount, then the new ones. In parallel, with a pause before every page; a few tokens
// are indexed in this thread alone.
void IndexAppended(const CpuModel& model, int layer, const LayerRows& rows, LayerIndex& index,
                   const JobLoops& loops = {});

}  // namespace spillway

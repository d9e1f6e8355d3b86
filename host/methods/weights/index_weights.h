#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "host/methods/weights/mlp.h"
#include "host/model/model_spec.h"

namespace spillway {

// The hash MLPs of a model. The vectors have one element per layer.
struct HashMlps {
  // mlp: ModelSpec::mlp_count() MLPs per layer, for keys. query_mlp: one MLP per query head, for
  // queries; empty if queries use the MLPs of the keys.
  std::vector<MlpLayer> mlp;
  std::vector<MlpLayer> query_mlp;

  int64_t bytes() const;
  // Upper limit of bytes() for a model, before its weights are loaded.
  static int64_t BytesOf(const ModelSpec& spec);
};

// Label channels, per layer: [H_kv][label_channel_count].
using LabelChannels = std::vector<std::vector<uint16_t>>;
int64_t LabelChannelBytes(const ModelSpec& spec);

// All weights that are uploaded for a model.
struct IndexWeights : HashMlps {
  LabelChannels channels;

  int64_t bytes() const;
  static int64_t BytesOf(const ModelSpec& spec);
};

// Each function reads from a safetensors file the tensors that the spec needs, with the shapes of
// MlpLayer and LabelChannels, and none if the spec needs none. For each layer l: layers.{l}.w1, b1,
// w2 and, if present, b2; with two hidden layers also w3 and b3; with query_weights the same names
// after query_; and layers.{l}.channels, integers. INVALID_ARGUMENT names the tensor that is
// missing, has the wrong shape, or is missing for some layers only (b2), or the channel that is out
// of range or repeated. REQUIRES: a normalised spec. Thread-safe.
absl::StatusOr<HashMlps> LoadHashMlps(const ModelSpec& spec,
                                      std::span<const std::byte> safetensors);
absl::StatusOr<LabelChannels> LoadLabelChannels(const ModelSpec& spec,
                                                std::span<const std::byte> safetensors);
absl::StatusOr<IndexWeights> LoadIndexWeights(const ModelSpec& spec,
                                              std::span<const std::byte> safetensors);

}  // namespace spillway

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "host/methods/weights/mlp.h"
#include "host/model/model_spec.h"

namespace spillway {

// The hash MLPs of a model, per layer.
struct HashMlps {
  // Those of keys, ModelSpec::mlp_count of them, and those of queries, one per
  // query head; empty where these are hashed with the keys'.
  std::vector<MlpLayer> mlp;
  std::vector<MlpLayer> query_mlp;

  int64_t bytes() const;
  // What bytes() of a model's is at most, before there are any.
  static int64_t BytesOf(const ModelSpec& spec);
};

// Label channels per layer, [H_kv][label_channel_count].
using LabelChannels = std::vector<std::vector<uint16_t>>;
int64_t LabelChannelBytes(const ModelSpec& spec);

// What is uploaded for a model.
struct IndexWeights : HashMlps {
  LabelChannels channels;

  int64_t bytes() const;
  static int64_t BytesOf(const ModelSpec& spec);
};

// Each reads from a safetensors file what the spec asks for, in the shapes
// above, and nothing of a spec that does not: layers.{l}.w1, b1, w2, where
// present b2, with two hidden layers w3 and b3; the same after query_;
// layers.{l}.channels, integers. INVALID_ARGUMENT names the tensor that is
// missing or misshapen, or of which a part of the layers has none (b2), or the
// channel that is out of range or repeated. REQUIRES: a normalised spec.
// Thread-safe.
absl::StatusOr<HashMlps> LoadHashMlps(const ModelSpec& spec,
                                      std::span<const std::byte> safetensors);
absl::StatusOr<LabelChannels> LoadLabelChannels(const ModelSpec& spec,
                                                std::span<const std::byte> safetensors);
absl::StatusOr<IndexWeights> LoadIndexWeights(const ModelSpec& spec,
                                              std::span<const std::byte> safetensors);

}  // namespace spillway

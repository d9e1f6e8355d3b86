#include "host/methods/weights/index_weights.h"

#include <initializer_list>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "host/base/status_macros.h"
#include "host/methods/weights/safetensors.h"

namespace spillway {
namespace {

// Loads layers.{l}.{prefix}w1 and so on. heads: H of the shapes in mlp.h.
absl::StatusOr<MlpLayer> LoadMlp(const SafeTensors& file, const ModelSpec& spec, int l,
                                 const std::string& prefix, int64_t heads) {
  const int64_t d = spec.head_dim, hidden = spec.hash.hidden_dim, bits = spec.hash.hash_bits;
  const auto name = [&](int layer, const char* tensor) {
    return absl::StrCat("layers.", layer, ".", prefix, tensor);
  };
  const auto load = [&](const char* tensor, std::initializer_list<int64_t> shape) {
    return file.Load(name(l, tensor), {shape.begin(), shape.size()});
  };
  const bool deep = spec.hash.hidden_layer_count == 2;
  MlpLayer layer;
  layer.head_dim = spec.head_dim;
  layer.hidden_dim = spec.hash.hidden_dim;
  layer.hash_bits = spec.hash.hash_bits;
  layer.residual = spec.hash.residual;
  ASSIGN_OR_RETURN(layer.w1, load("w1", {heads, d, hidden}));
  ASSIGN_OR_RETURN(layer.b1, load("b1", {heads, hidden}));
  ASSIGN_OR_RETURN(layer.w2, load("w2", {heads, hidden, deep ? hidden : bits}));
  // b2 is optional, but for all layers together: if only some have it, it was forgotten in the
  // others.
  const bool first_has_b2 = file.Contains(name(0, "b2"));
  if (deep || first_has_b2 || file.Contains(name(l, "b2"))) {
    ASSIGN_OR_RETURN(layer.b2, load("b2", {heads, deep ? hidden : bits}));
  }
  if (deep) {
    ASSIGN_OR_RETURN(layer.w3, load("w3", {heads, hidden, bits}));
    ASSIGN_OR_RETURN(layer.b3, load("b3", {heads, bits}));
  }
  if (!first_has_b2 && !layer.b2.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("safetensors tensor \"", name(0, "b2"),
                                                   "\" is missing, though \"", name(l, "b2"),
                                                   "\" is there"));
  }
  return layer;
}

absl::StatusOr<std::vector<uint16_t>> LoadChannels(const SafeTensors& file, const ModelSpec& spec,
                                                   int l) {
  const int count = spec.indices.label_channel_count;
  const std::string name = absl::StrCat("layers.", l, ".channels");
  const int64_t shape[] = {spec.kv_head_count, count};
  ASSIGN_OR_RETURN(const std::vector<int64_t> loaded, file.LoadIntegers(name, shape));
  std::vector<uint16_t> channels;
  for (int h = 0; h < spec.kv_head_count; ++h) {
    std::vector<bool> seen(spec.head_dim, false);
    for (int i = 0; i < count; ++i) {
      const int64_t channel = loaded[h * count + i];
      if (channel < 0 || channel >= spec.head_dim || seen[channel]) {
        return absl::InvalidArgumentError(
            absl::StrCat("safetensors tensor \"", name, "\" has channel ", channel, " for KV head ",
                         h, ", which is not in [0, ", spec.head_dim, ") or is there twice"));
      }
      seen[channel] = true;
      channels.push_back(static_cast<uint16_t>(channel));
    }
  }
  return channels;
}

}  // namespace

absl::StatusOr<HashMlps> LoadHashMlps(const ModelSpec& spec,
                                      std::span<const std::byte> safetensors) {
  HashMlps mlps;
  if (spec.hash.kind != HashKind::kMlp) return mlps;
  ASSIGN_OR_RETURN(const SafeTensors file, SafeTensors::Parse(safetensors));
  for (int l = 0; l < spec.layer_count; ++l) {
    ASSIGN_OR_RETURN(mlps.mlp.emplace_back(), LoadMlp(file, spec, l, "", spec.mlp_count()));
    if (!spec.hash.query_weights) continue;
    ASSIGN_OR_RETURN(mlps.query_mlp.emplace_back(),
                     LoadMlp(file, spec, l, "query_", spec.query_head_count));
  }
  return mlps;
}

absl::StatusOr<LabelChannels> LoadLabelChannels(const ModelSpec& spec,
                                                std::span<const std::byte> safetensors) {
  LabelChannels channels;
  if (spec.indices.label_channel_count == 0) return channels;
  ASSIGN_OR_RETURN(const SafeTensors file, SafeTensors::Parse(safetensors));
  for (int l = 0; l < spec.layer_count; ++l) {
    ASSIGN_OR_RETURN(channels.emplace_back(), LoadChannels(file, spec, l));
  }
  return channels;
}

absl::StatusOr<IndexWeights> LoadIndexWeights(const ModelSpec& spec,
                                              std::span<const std::byte> safetensors) {
  IndexWeights weights;
  ASSIGN_OR_RETURN(static_cast<HashMlps&>(weights), LoadHashMlps(spec, safetensors));
  ASSIGN_OR_RETURN(weights.channels, LoadLabelChannels(spec, safetensors));
  return weights;
}

int64_t HashMlps::bytes() const {
  size_t bytes = 0;
  for (const std::vector<MlpLayer>* mlps : {&mlp, &query_mlp}) {
    for (const MlpLayer& m : *mlps) {
      for (const std::vector<float>* tensor : {&m.w1, &m.b1, &m.w2, &m.b2, &m.w3, &m.b3}) {
        bytes += tensor->size() * sizeof(float);
      }
    }
  }
  return static_cast<int64_t>(bytes);
}

int64_t HashMlps::BytesOf(const ModelSpec& spec) {
  if (spec.hash.kind != HashKind::kMlp) return 0;
  const int64_t d = spec.head_dim, hidden = spec.hash.hidden_dim, bits = spec.hash.hash_bits;
  const int64_t mlps = spec.mlp_count() + (spec.hash.query_weights ? spec.query_head_count : 0);
  const int64_t of_mlp = (d + 1) * hidden +
                         (spec.hash.hidden_layer_count - 1) * (hidden + 1) * hidden +
                         (hidden + 1) * bits;
  return spec.layer_count * mlps * of_mlp * static_cast<int64_t>(sizeof(float));
}

int64_t LabelChannelBytes(const ModelSpec& spec) {
  return int64_t{spec.layer_count} * spec.kv_head_count * spec.indices.label_channel_count *
         static_cast<int64_t>(sizeof(uint16_t));
}

int64_t IndexWeights::bytes() const {
  size_t count = 0;
  for (const auto& c : channels) count += c.size();
  return HashMlps::bytes() + static_cast<int64_t>(count * sizeof(uint16_t));
}

int64_t IndexWeights::BytesOf(const ModelSpec& spec) {
  return HashMlps::BytesOf(spec) + LabelChannelBytes(spec);
}

}  // namespace spillway

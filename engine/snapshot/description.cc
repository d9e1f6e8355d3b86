#include "engine/snapshot/description.h"

#include <nlohmann/json.hpp>
#include <span>

#include "absl/strings/str_cat.h"
#include "engine/sha256.h"

namespace spillway {
namespace {

using Json = nlohmann::ordered_json;

const char* KindName(HashKind kind) {
  switch (kind) {
    case HashKind::kNone:
      return "none";
    case HashKind::kRotation:
      return "rotation";
    case HashKind::kMlp:
      return "mlp";
  }
  return "";
}

// Fields that this kind does not use are left out, because they may have any value.
Json Describe(const HashSpec& hash) {
  Json json = {{"kind", KindName(hash.kind)}};
  if (hash.kind == HashKind::kNone) return json;
  json["raw_keys"] = hash.raw_keys;
  if (hash.kind == HashKind::kRotation) {
    json["bits_per_dim"] = hash.bits_per_dim;
    json["seed"] = hash.seed;
    // Older descriptions do not have it.
    if (hash.value_bits > 0) json["value_bits"] = hash.value_bits;
    return json;
  }
  json["hash_bits"] = hash.hash_bits;
  json["hidden_dim"] = hash.hidden_dim;
  json["hidden_layer_count"] = hash.hidden_layer_count;
  json["residual"] = hash.residual;
  json["per_query_head"] = hash.per_query_head;
  json["query_weights"] = hash.query_weights;
  return json;
}

}  // namespace

std::string DescribeModel(const std::string& name, const ModelSpec& spec) {
  const KeyIndexSpec& indices = spec.indices;
  Json json = {{"name", name},
               {"layer_count", spec.layer_count},
               {"query_head_count", spec.query_head_count},
               {"kv_head_count", spec.kv_head_count},
               {"head_dim", spec.head_dim},
               {"dtype", std::string(DTypeName(spec.dtype))},
               {"softmax_scale", spec.softmax_scale},
               {"first_layer", spec.first_layer},
               {"first_kv_head", spec.first_kv_head},
               {"hash_weights", Describe(spec.hash)},
               {"key_indices",
                {{"int4_keys", indices.int4_keys},
                 {"quest_page_token_count", indices.quest_page_token_count},
                 {"label_channel_count", indices.label_channel_count},
                 {"lsh_table_count", indices.lsh_table_count},
                 {"lsh_bits", indices.lsh_bits},
                 {"lsh_seed", indices.lsh_seed}}},
               {"resident_sample_fraction", spec.resident_sample_fraction}};
  if (spec.row_type != RowType::kElements) {
    json["row_type"] = std::string(RowTypeName(spec.row_type));
  }
  // Descriptions of models without sinks, and older ones, do not have it.
  if (!spec.sink_logits.empty()) {
    json["sink_logits_sha256"] = Sha256::Of(std::as_bytes(std::span(spec.sink_logits)));
  }
  // A name from a file of unknown origin may not be valid UTF-8.
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string FirstDifference(const std::string& saved, const std::string& there) {
  const Json a = Json::parse(saved);
  const Json b = Json::parse(there);
  for (const auto& [name, value] : a.items()) {
    if (!b.contains(name)) return absl::StrCat(name, " is nothing, saved was ", value.dump());
  }
  for (const auto& [name, value] : b.items()) {
    if (name == "name") continue;
    // Integers that older builds did not save had the value 0.
    const std::string was = a.contains(name)            ? a[name].dump()
                            : value.is_number_integer() ? "0"
                                                        : "nothing";
    if (was != value.dump()) {
      return absl::StrCat(name, " is ", value.dump(), ", saved was ", was);
    }
  }
  return "";
}

}  // namespace spillway

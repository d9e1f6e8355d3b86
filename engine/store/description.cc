#include "engine/store/description.h"

#include <array>
#include <cmath>
#include <exception>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace spillway {
namespace {

using Json = nlohmann::ordered_json;

// The names of an enum's values, in the order of the values. Never change a name, because other
// versions read it.
template <typename T>
struct Names;
template <>
struct Names<DType> {
  static constexpr std::array kNames = {"f32", "f16", "bf16"};
};
template <>
struct Names<RowType> {
  static constexpr std::array kNames = {"model", "int8"};
};
template <>
struct Names<HashKind> {
  static constexpr std::array kNames = {"none", "rotation", "mlp"};
};
template <>
struct Names<Tail> {
  static constexpr std::array kNames = {"none", "uniform", "stratified", "lsh_sampling"};
};
template <>
struct Names<Bound> {
  static constexpr std::array kNames = {"denominator", "paper", "ratio"};
};
template <>
struct Names<HeavyKind> {
  static constexpr std::array kNames = {"count", "fraction", "mass", "adaptive"};
};
template <>
struct Names<Selector> {
  static constexpr std::array kNames = {"asymmetric", "hamming", "oracle",         "all",
                                        "int4_keys",  "quest",   "double_sparsity"};
};

template <typename T>
concept Named = requires {
  Names<T>::kNames;
};

// Writer writes members and Reader reads them, so that one list of a struct's members serves both.
class Writer {
 public:
  template <typename T>
  void Member(const char* name, const T& value) {
    if constexpr (Named<T>) {
      json_[name] = Names<T>::kNames.at(static_cast<size_t>(value));
    } else {
      json_[name] = value;
    }
  }
  template <typename T>
  void Added(const char* name, const T& value) {
    Member(name, value);
  }
  // JSON has no infinity: it is written as null.
  void Added(const char* name, const std::vector<float>& logits) {
    if (logits.empty()) return;
    Json array = Json::array();
    for (const float logit : logits) {
      array.push_back(std::isfinite(logit) ? Json(logit) : Json(nullptr));
    }
    json_[name] = std::move(array);
  }
  Json& json() { return json_; }

 private:
  Json json_ = Json::object();
};

// Throws if a member is missing or has another type.
class Reader {
 public:
  explicit Reader(const Json& json) : json_(json) {}
  template <typename T>
  void Member(const char* name, T& value) const {
    const Json& member = json_.at(name);
    if constexpr (Named<T>) {
      const auto& names = Names<T>::kNames;
      size_t i = 0;
      for (const auto text = member.template get<std::string>(); text != names[i];) {
        if (++i == names.size()) throw std::runtime_error(absl::StrCat(name, " is ", text));
      }
      value = static_cast<T>(i);
    } else {
      member.get_to(value);
    }
  }
  // Reads a member that older builds did not write. If it is missing, the value stays unchanged.
  template <typename T>
  void Added(const char* name, T& value) const {
    if (json_.contains(name)) Member(name, value);
  }
  void Added(const char* name, std::vector<float>& logits) const {
    if (!json_.contains(name)) return;
    for (const Json& logit : json_[name]) {
      logits.push_back(logit.is_null() ? -std::numeric_limits<float>::infinity()
                                       : logit.get<float>());
    }
  }

 private:
  const Json& json_;
};

template <typename Archive, typename S>
void SpecMembers(Archive& archive, S& spec) {
  archive.Member("layer_count", spec.layer_count);
  archive.Member("query_head_count", spec.query_head_count);
  archive.Member("kv_head_count", spec.kv_head_count);
  archive.Member("head_dim", spec.head_dim);
  archive.Member("dtype", spec.dtype);
  archive.Member("softmax_scale", spec.softmax_scale);
  archive.Added("row_type", spec.row_type);
  archive.Added("first_layer", spec.first_layer);
  archive.Added("first_kv_head", spec.first_kv_head);
  archive.Added("sink_logits", spec.sink_logits);
  archive.Member("hash.kind", spec.hash.kind);
  archive.Member("hash.raw_keys", spec.hash.raw_keys);
  archive.Member("hash.bits_per_dim", spec.hash.bits_per_dim);
  archive.Member("hash.seed", spec.hash.seed);
  archive.Added("hash.value_bits", spec.hash.value_bits);
  archive.Member("hash.hash_bits", spec.hash.hash_bits);
  archive.Member("hash.hidden_dim", spec.hash.hidden_dim);
  archive.Member("hash.hidden_layer_count", spec.hash.hidden_layer_count);
  archive.Member("hash.residual", spec.hash.residual);
  archive.Member("hash.per_query_head", spec.hash.per_query_head);
  archive.Member("hash.query_weights", spec.hash.query_weights);
  archive.Member("indices.int4_keys", spec.indices.int4_keys);
  archive.Member("indices.quest_page_token_count", spec.indices.quest_page_token_count);
  archive.Member("indices.label_channel_count", spec.indices.label_channel_count);
  archive.Member("indices.lsh_table_count", spec.indices.lsh_table_count);
  archive.Member("indices.lsh_bits", spec.indices.lsh_bits);
  archive.Member("indices.lsh_seed", spec.indices.lsh_seed);
  archive.Member("resident_sample_fraction", spec.resident_sample_fraction);
  archive.Member("resident_sample_seed", spec.resident_sample_seed);
}

template <typename Archive, typename P>
void PolicyMembers(Archive& archive, P& policy) {
  archive.Member("tail", policy.tail);
  archive.Member("bound", policy.bound);
  archive.Member("pilot_token_count", policy.pilot_token_count);
  archive.Member("inflation", policy.inflation);
  archive.Member("sink_token_count", policy.sink_token_count);
  archive.Member("window_token_count", policy.window_token_count);
  archive.Member("dense_token_count", policy.dense_token_count);
  archive.Member("dense_layers", policy.dense_layers);
  archive.Member("selector", policy.selector);
  archive.Member("heavy_kind", policy.heavy_kind);
  archive.Member("heavy_count", policy.heavy_count);
  archive.Member("heavy_fraction", policy.heavy_fraction);
  archive.Member("heavy_mass", policy.heavy_mass);
  archive.Member("heavy_floor", policy.heavy_floor);
  archive.Member("heavy_ceiling", policy.heavy_ceiling);
  archive.Member("candidate_count", policy.candidate_count);
  archive.Member("candidate_fraction", policy.candidate_fraction);
  archive.Member("epsilon", policy.epsilon);
  archive.Member("delta", policy.delta);
  archive.Member("seed", policy.seed);
  archive.Member("row_count_max", policy.row_count_max);
}

Json SpecToJson(const ModelSpec& spec) {
  Writer writer;
  SpecMembers(writer, spec);
  return std::move(writer.json());
}

ModelSpec SpecFromJson(const Json& json) {
  ModelSpec spec;
  const Reader reader(json);
  SpecMembers(reader, spec);
  return spec;
}

Json PolicyToJson(const Policy& policy) {
  Writer writer;
  PolicyMembers(writer, policy);
  if (policy.candidate_selector) {
    writer.Member("candidate_selector", *policy.candidate_selector);
  }
  return std::move(writer.json());
}

Policy PolicyFromJson(const Json& json) {
  Policy policy;
  const Reader reader(json);
  PolicyMembers(reader, policy);
  if (json.contains("candidate_selector")) {
    reader.Member("candidate_selector", policy.candidate_selector.emplace());
  }
  return policy;
}

// Runs `parse`, which throws if the JSON is wrong.
template <typename T, typename Parse>
absl::StatusOr<T> Parsed(std::string_view what, std::string_view text, Parse parse) {
  try {
    return parse(Json::parse(text.begin(), text.end()));
  } catch (const std::exception& error) {
    return absl::DataLossError(
        absl::StrCat("the description of a ", std::string(what), ": ", error.what()));
  }
}

}  // namespace

std::string Describe(const StoredModel& model) {
  return Json{{"id", model.id},
              {"spec", SpecToJson(model.spec)},
              {"policy", PolicyToJson(model.policy)},
              {"create_time_ns", absl::ToUnixNanos(model.create_time)}}
      .dump();
}

std::string Describe(const StoredSequence& sequence) {
  Json json = {{"id", sequence.id},
               {"model_id", sequence.model_id},
               {"policy", PolicyToJson(sequence.policy)},
               {"create_time_ns", absl::ToUnixNanos(sequence.create_time)},
               {"named", sequence.named},
               {"client", sequence.client}};
  if (sequence.ttl != absl::InfiniteDuration()) {
    json["ttl_ns"] = absl::ToInt64Nanoseconds(sequence.ttl);
  }
  return json.dump();
}

absl::StatusOr<StoredModel> ParseStoredModel(std::string_view json) {
  auto model = Parsed<StoredModel>("model", json, [](const Json& json) {
    return StoredModel{json.at("id").get<std::string>(), SpecFromJson(json.at("spec")),
                       PolicyFromJson(json.at("policy")),
                       absl::FromUnixNanos(json.at("create_time_ns").get<int64_t>())};
  });
  if (!model.ok()) return model;
  std::vector<FieldError> errors = Normalize(model->spec);
  if (errors.empty()) errors = Validate(model->policy, model->spec);
  if (errors.empty()) return model;
  return absl::DataLossError(absl::StrCat("models/", model->id, ": ", errors.front().field, ": ",
                                          errors.front().description));
}

absl::StatusOr<StoredSequence> ParseStoredSequence(std::string_view json) {
  return Parsed<StoredSequence>("sequence", json, [](const Json& json) {
    return StoredSequence{json.at("id").get<std::string>(), json.at("model_id").get<std::string>(),
                          PolicyFromJson(json.at("policy")),
                          json.contains("ttl_ns")
                              ? absl::Nanoseconds(json.at("ttl_ns").get<int64_t>())
                              : absl::InfiniteDuration(),
                          absl::FromUnixNanos(json.at("create_time_ns").get<int64_t>()),
                          // Earlier versions did not write it; then only the ttl counts.
                          json.value("named", true), json.value("client", "")};
  });
}

}  // namespace spillway

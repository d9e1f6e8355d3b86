#include "host/model/model_spec.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "host/model/field_checks.h"

namespace spillway {
namespace {

constexpr int kLayerCountMax = 1024;
constexpr int kQueryHeadCountMax = 1024;
constexpr int kHeadDimStep = 16;
constexpr int kBitsPerDimMax = 4;
constexpr int kValueBitsMax = 3;
constexpr int kHashBitsStep = 32;
constexpr int kHashBitsMax = 1024;
constexpr int kHiddenDimMax = 4096;
constexpr int kHiddenLayerCountMax = 2;
constexpr int kLabelChannelStep = 8;
constexpr int kLshTableCountMax = 512;
constexpr int kLshBitsMax = 16;

// Returns whether spec.group() can be used.
bool CheckHeads(const ModelSpec& spec, FieldChecks& checks) {
  const bool query_ok =
      checks.InRange("query_head_count", spec.query_head_count, 1, kQueryHeadCountMax);
  const bool kv_ok = checks.InRange("kv_head_count", spec.kv_head_count, 1, kQueryHeadCountMax);
  if (!query_ok || !kv_ok) return false;
  if (spec.query_head_count % spec.kv_head_count != 0) {
    checks.Add("query_head_count",
               absl::StrCat("value ", spec.query_head_count, " is not a multiple of kv_head_count ",
                            spec.kv_head_count));
    return false;
  }
  return true;
}

void NormalizeMlp(ModelSpec& spec, bool heads_ok, FieldChecks& checks) {
  HashSpec& hash = spec.hash;
  const bool bits_ok = checks.MultipleInRange("hash_weights.mlp.hash_bits", hash.hash_bits,
                                              kHashBitsStep, kHashBitsMax);
  if (heads_ok && spec.groups_per_kv_head() > 1) {
    checks.Add("hash_weights.mlp",
               absl::StrCat("serves at most ", kGroupMax, " query heads for each KV head, not ",
                            spec.query_heads_per_kv_head()));
  }
  if (heads_ok && bits_ok && spec.plane_bits() > kHashBitsMax) {
    checks.Add("hash_weights.mlp.hash_bits",
               absl::StrCat("value ", hash.hash_bits, " for each of ", spec.key_code_count(),
                            " query heads is ", spec.plane_bits(), " bits a key, more than ",
                            kHashBitsMax));
  }
  if (hash.hidden_dim == 0) hash.hidden_dim = spec.head_dim;
  checks.InRange("hash_weights.mlp.hidden_dim", hash.hidden_dim, 1, kHiddenDimMax);
  checks.InRange("hash_weights.mlp.hidden_layer_count", hash.hidden_layer_count, 1,
                 kHiddenLayerCountMax);
  if (hash.residual && hash.hidden_layer_count > 1) {
    checks.Add("hash_weights.mlp.residual", "only with one hidden layer");
  }
  if (hash.residual && (hash.hidden_dim != spec.head_dim || hash.hash_bits != spec.head_dim)) {
    checks.Add("hash_weights.mlp.residual",
               absl::StrCat("needs hidden_dim = head_dim = hash_bits, which are ", hash.hidden_dim,
                            ", ", spec.head_dim, " and ", hash.hash_bits));
  }
}

void CheckIndices(const ModelSpec& spec, FieldChecks& checks) {
  const KeyIndexSpec& indices = spec.indices;
  const int page = indices.quest_page_token_count;
  if (page != 0 && page != 16 && page != 32 && page != 64 && page != 128) {
    checks.Add("key_indices.quest_page_token_count",
               absl::StrCat("value ", page, " is not 0, 16, 32, 64 or 128"));
  }
  if (indices.label_channel_count != 0) {
    checks.MultipleInRange("key_indices.label_channel_count", indices.label_channel_count,
                           kLabelChannelStep, spec.head_dim);
  }
  if (indices.lsh_table_count != 0) {
    checks.InRange("key_indices.lsh_table_count", indices.lsh_table_count, 1, kLshTableCountMax);
    checks.InRange("key_indices.lsh_bits", indices.lsh_bits, 1, kLshBitsMax);
    if (spec.hash.raw_keys) {
      checks.Add("key_indices.lsh_table_count", "needs centred keys; hash_weights have raw_keys");
    }
  } else if (indices.lsh_bits != 0) {
    checks.Add("key_indices.lsh_bits", "only with lsh_table_count");
  }
}

void CheckSinks(const ModelSpec& spec, FieldChecks& checks) {
  const auto count = static_cast<int64_t>(spec.sink_logits.size());
  if (count == 0) return;
  const int64_t wanted = int64_t{spec.layer_count} * spec.query_head_count;
  if (count != wanted || count > kSinkLogitCountMax) {
    checks.Add("sink_logits",
               absl::StrCat("has ", count, " values, not layer_count ", spec.layer_count,
                            " * query_head_count ", spec.query_head_count, ", at most ",
                            kSinkLogitCountMax));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const float logit = spec.sink_logits[i];
    // -infinity is allowed: that head has no sink.
    if (std::isfinite(logit) || logit < 0) continue;
    checks.Add("sink_logits", absl::StrCat("value ", logit, " of layer ", i / spec.query_head_count,
                                           ", query head ", i % spec.query_head_count,
                                           " is neither finite nor -infinity"));
    return;
  }
}

void CheckRowType(const ModelSpec& spec, FieldChecks& checks) {
  if (spec.row_type > RowType::kInt8) {
    checks.Add("row_type", absl::StrCat("value ", static_cast<int>(spec.row_type), " is unknown"));
  }
  if (spec.row_type != RowType::kInt8) return;
  if (spec.hash.kind == HashKind::kMlp) {
    checks.Add("row_type", "int8 does not go with hash_weights.mlp, which read keys in the dtype");
  }
  if (spec.indices.any()) {
    checks.Add("row_type", "int8 does not go with key_indices, which read keys in the dtype");
  }
}

// Refuses fields that only optional methods read, if the method is not in this build.
void CheckMethods(const ModelSpec& spec, FieldChecks& checks) {
  const auto check = [&](bool asked, std::string_view field) {
    if (asked && !HasMethodOf(field)) checks.Add(field, std::string(kNoSuchMethod));
  };
  check(spec.hash.kind == HashKind::kMlp, "hash_weights.mlp");
  check(spec.indices.int4_keys, "key_indices.int4_keys");
  check(spec.indices.quest_page_token_count != 0, "key_indices.quest_page_token_count");
  check(spec.indices.label_channel_count != 0, "key_indices.label_channel_count");
  check(spec.indices.lsh_table_count != 0, "key_indices.lsh_table_count");
}

}  // namespace

std::vector<FieldError> Normalize(ModelSpec& spec) {
  FieldChecks checks;
  checks.InRange("layer_count", spec.layer_count, 1, kLayerCountMax);
  const bool heads_ok = CheckHeads(spec, checks);
  checks.InRange("first_layer", spec.first_layer, 0, kLayerCountMax - 1);
  checks.InRange("first_kv_head", spec.first_kv_head, 0, kQueryHeadCountMax - 1);
  const bool dim_ok = checks.MultipleInRange("head_dim", spec.head_dim, kHeadDimStep, kHeadDimMax);
  if (spec.dtype > DType::kBF16) {
    checks.Add("dtype", absl::StrCat("value ", static_cast<int>(spec.dtype), " is unknown"));
  }
  if (spec.softmax_scale == 0 && dim_ok) {
    spec.softmax_scale = 1 / std::sqrt(static_cast<double>(spec.head_dim));
  } else if (!std::isfinite(spec.softmax_scale) || spec.softmax_scale < 0) {
    checks.Add("softmax_scale",
               absl::StrCat("value ", spec.softmax_scale, " is not finite and greater than 0"));
  }
  if (!(spec.resident_sample_fraction >= 0 &&
        spec.resident_sample_fraction <= kResidentSampleFractionMax)) {
    checks.Add("resident_sample_fraction",
               absl::StrCat("value ", spec.resident_sample_fraction, " is not in [0, ",
                            kResidentSampleFractionMax, "]"));
  }
  switch (spec.hash.kind) {
    case HashKind::kNone:
      break;
    case HashKind::kRotation:
      checks.InRange("hash_weights.rotation.bits_per_dim", spec.hash.bits_per_dim, 1,
                     kBitsPerDimMax);
      checks.InRange("hash_weights.rotation.value_bits", spec.hash.value_bits, 0, kValueBitsMax);
      break;
    case HashKind::kMlp:
      NormalizeMlp(spec, heads_ok, checks);
      break;
    default:
      checks.Add("hash_weights",
                 absl::StrCat("kind ", static_cast<int>(spec.hash.kind), " is unknown"));
  }
  if (heads_ok) CheckSinks(spec, checks);
  CheckIndices(spec, checks);
  CheckRowType(spec, checks);
  CheckMethods(spec, checks);
  return checks.Take();
}

}  // namespace spillway

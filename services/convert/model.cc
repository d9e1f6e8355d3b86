#include "services/convert/model.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "engine/errors.h"
#include "host/base/status_macros.h"
#include "host/base/steady_time.h"
#include "services/convert/policy.h"
#include "services/convert/tensor.h"

namespace spillway {
namespace {

constexpr absl::Duration kTtlMax = absl::Hours(24 * 365);

HashSpec HashFromProto(const v1::HashWeights& weights) {
  HashSpec hash;
  switch (weights.kind_case()) {
    case v1::HashWeights::kRotation:
      hash.kind = HashKind::kRotation;
      if (weights.rotation().has_bits_per_dim()) {
        hash.bits_per_dim = weights.rotation().bits_per_dim();
      }
      hash.seed = weights.rotation().seed();
      hash.raw_keys = weights.rotation().raw_keys();
      hash.value_bits = weights.rotation().value_bits();
      break;
    case v1::HashWeights::kMlp:
      hash.kind = HashKind::kMlp;
      if (weights.mlp().has_hash_bits()) hash.hash_bits = weights.mlp().hash_bits();
      // In a HashSpec, 0 means head_dim. A client that sends 0 is refused in FromProto().
      hash.hidden_dim = weights.mlp().hidden_dim();
      hash.residual = weights.mlp().residual();
      hash.per_query_head = weights.mlp().per_query_head();
      hash.raw_keys = weights.mlp().raw_keys();
      if (weights.mlp().has_hidden_layer_count()) {
        hash.hidden_layer_count = weights.mlp().hidden_layer_count();
      }
      hash.query_weights = weights.mlp().query_weights();
      break;
    case v1::HashWeights::KIND_NOT_SET:
      hash.kind = HashKind::kNone;
      break;
  }
  return hash;
}

v1::HashWeights HashToProto(const HashSpec& hash) {
  v1::HashWeights weights;
  if (hash.kind == HashKind::kRotation) {
    weights.mutable_rotation()->set_bits_per_dim(hash.bits_per_dim);
    weights.mutable_rotation()->set_seed(hash.seed);
    weights.mutable_rotation()->set_raw_keys(hash.raw_keys);
    weights.mutable_rotation()->set_value_bits(hash.value_bits);
  } else if (hash.kind == HashKind::kMlp) {
    weights.mutable_mlp()->set_hash_bits(hash.hash_bits);
    weights.mutable_mlp()->set_hidden_dim(hash.hidden_dim);
    weights.mutable_mlp()->set_residual(hash.residual);
    weights.mutable_mlp()->set_per_query_head(hash.per_query_head);
    weights.mutable_mlp()->set_raw_keys(hash.raw_keys);
    weights.mutable_mlp()->set_hidden_layer_count(hash.hidden_layer_count);
    weights.mutable_mlp()->set_query_weights(hash.query_weights);
  }
  return weights;
}

KeyIndexSpec IndicesFromProto(const v1::KeyIndices& indices) {
  return {indices.int4_keys(),
          indices.quest_page_token_count(),
          indices.label_channel_count(),
          indices.lsh_table_count(),
          indices.lsh_bits(),
          indices.lsh_seed()};
}

v1::KeyIndices IndicesToProto(const KeyIndexSpec& spec) {
  v1::KeyIndices indices;
  indices.set_int4_keys(spec.int4_keys);
  indices.set_quest_page_token_count(spec.quest_page_token_count);
  indices.set_label_channel_count(spec.label_channel_count);
  indices.set_lsh_table_count(spec.lsh_table_count);
  indices.set_lsh_bits(spec.lsh_bits);
  indices.set_lsh_seed(spec.lsh_seed);
  return indices;
}

}  // namespace

google::protobuf::Timestamp ToProto(absl::Time time) {
  google::protobuf::Timestamp out;
  const timespec spec = absl::ToTimespec(time);
  out.set_seconds(spec.tv_sec);
  out.set_nanos(static_cast<int32_t>(spec.tv_nsec));
  return out;
}

absl::StatusOr<ModelDescription> FromProto(const v1::Model& model) {
  std::vector<FieldError> errors;
  ModelDescription description;
  ModelSpec& spec = description.spec;
  spec.layer_count = model.layer_count();
  spec.query_head_count = model.query_head_count();
  spec.kv_head_count = model.kv_head_count();
  spec.head_dim = model.head_dim();
  spec.first_layer = model.first_layer();
  spec.first_kv_head = model.first_kv_head();
  spec.sink_logits.assign(model.sink_logits().begin(), model.sink_logits().end());
  if (const std::optional<DType> dtype = FromProto(model.dtype())) {
    spec.dtype = *dtype;
  } else {
    errors.push_back({"model.dtype", absl::StrCat("value ", static_cast<int>(model.dtype()),
                                                  " is not DTYPE_F32, F16 or BF16")});
  }
  if (model.row_type() == v1::ROW_TYPE_INT8) {
    spec.row_type = RowType::kInt8;
  } else if (model.row_type() > v1::ROW_TYPE_INT8 || model.row_type() < 0) {
    errors.push_back({"model.row_type", absl::StrCat("value ", static_cast<int>(model.row_type()),
                                                     " is not ROW_TYPE_MODEL or INT8")});
  }
  if (model.has_softmax_scale()) {
    spec.softmax_scale = model.softmax_scale();
    // In a ModelSpec, 0 means the default, so a client must not send it.
    if (!std::isfinite(spec.softmax_scale) || spec.softmax_scale <= 0) {
      errors.push_back({"model.softmax_scale", absl::StrCat("value ", spec.softmax_scale,
                                                            " is not finite and greater than 0")});
      spec.softmax_scale = 1;
    }
  }
  if (model.has_resident_sample_fraction()) {
    spec.resident_sample_fraction = model.resident_sample_fraction();
  }
  spec.hash = HashFromProto(model.hash_weights());
  spec.indices = IndicesFromProto(model.key_indices());
  const v1::MlpHash& mlp = model.hash_weights().mlp();
  if (mlp.has_hidden_dim() && mlp.hidden_dim() == 0) {
    errors.push_back({"model.hash_weights.mlp.hidden_dim", "value 0 is not in [1, 4096]"});
  }
  for (FieldError& error : Normalize(spec)) {
    errors.push_back({"model." + error.field, std::move(error.description)});
  }
  if (!errors.empty()) return InvalidFields(errors);
  ASSIGN_OR_RETURN(description.policy, ApplyPolicy(model.default_policy(), DefaultPolicy(spec),
                                                   spec, "model.default_policy."));
  spec.resident_sample_seed = description.policy.seed;
  return description;
}

v1::Model ToProto(const Model& model, const Engine& engine) {
  v1::Model out;
  const ModelSpec& spec = model.spec;
  out.set_name(model.name);
  out.set_layer_count(spec.layer_count);
  out.set_query_head_count(spec.query_head_count);
  out.set_kv_head_count(spec.kv_head_count);
  out.set_head_dim(spec.head_dim);
  out.set_dtype(ToProto(spec.dtype));
  out.set_row_type(spec.row_type == RowType::kInt8 ? v1::ROW_TYPE_INT8 : v1::ROW_TYPE_MODEL);
  out.set_softmax_scale(spec.softmax_scale);
  out.set_first_layer(spec.first_layer);
  out.set_first_kv_head(spec.first_kv_head);
  out.mutable_sink_logits()->Add(spec.sink_logits.begin(), spec.sink_logits.end());
  out.set_resident_sample_fraction(spec.resident_sample_fraction);
  *out.mutable_default_policy() = ToProto(model.policy);
  if (spec.hash.kind != HashKind::kNone) *out.mutable_hash_weights() = HashToProto(spec.hash);
  if (spec.indices.any()) *out.mutable_key_indices() = IndicesToProto(spec.indices);
  out.set_ready(model.ready());
  out.set_row_bytes_per_token(spec.row_bytes() * spec.kv_head_count * spec.layer_count);
  out.set_index_bytes_per_token(engine.IndexBytesPerToken(spec));
  *out.mutable_create_time() = ToProto(model.create_time);
  return out;
}

absl::StatusOr<absl::Duration> TtlFromProto(const v1::Sequence& sequence, absl::Duration unset) {
  if (!sequence.has_ttl()) return unset;
  const google::protobuf::Duration& ttl = sequence.ttl();
  const absl::Duration duration = absl::Seconds(ttl.seconds()) + absl::Nanoseconds(ttl.nanos());
  if (ttl.seconds() < 0 || ttl.nanos() < 0 || ttl.nanos() > 999'999'999 || duration > kTtlMax) {
    return InvalidField("sequence.ttl", absl::StrCat("value ", ttl.seconds(), " s ", ttl.nanos(),
                                                     " ns is not in [0, 365 days]"));
  }
  return duration == absl::ZeroDuration() ? absl::InfiniteDuration() : duration;
}

v1::Sequence ToProto(const Sequence& sequence) {
  v1::Sequence out;
  const SequenceSnapshot snapshot = sequence.snapshot();
  out.set_name(sequence.name);
  out.set_model(sequence.model->name);
  *out.mutable_policy() = ToProto(sequence.policy);
  google::protobuf::Duration& ttl = *out.mutable_ttl();
  if (sequence.ttl != absl::InfiniteDuration()) {
    const timespec spec = absl::ToTimespec(sequence.ttl);
    ttl.set_seconds(spec.tv_sec);
    ttl.set_nanos(static_cast<int32_t>(spec.tv_nsec));
  }
  if (const SteadyTime end = sequence.expire_time(); end != kNever) {
    *out.mutable_expire_time() = ToProto(absl::Now() + absl::FromChrono(end - SteadyNow()));
  }
  out.set_named(sequence.named);
  out.set_abandoned(sequence.abandoned());
  out.set_sealed(snapshot.sealed);
  out.set_token_count(snapshot.token_count);
  out.mutable_layer_token_counts()->Add(snapshot.layer_token_counts.begin(),
                                        snapshot.layer_token_counts.end());
  out.set_generation(snapshot.generation);
  out.set_row_bytes(snapshot.row_bytes);
  out.set_index_bytes(snapshot.index_bytes);
  *out.mutable_create_time() = ToProto(sequence.create_time);
  return out;
}

void ToProto(const WorkCounters& counters, v1::WorkStatistics& work) {
  work.set_attend_count(counters.attend_count);
  work.set_appended_row_count(counters.appended_row_count);
  work.set_touched_row_count(counters.touched_row_count);
  work.set_visible_row_count(counters.visible_row_count);
  work.set_attend_time_us(counters.attend_time_us);
  work.set_exact_count(counters.exact_count);
  work.set_statistical_count(counters.statistical_count);
  work.set_none_count(counters.none_count);
}

void ToProto(const HeadAudit& head, v1::HeadAudit& out) {
  out.set_layer(head.layer);
  out.set_kv_head(head.kv_head);
  out.set_check_count(head.check_count);
  out.set_violation_count(head.violation_count);
  out.set_recent_check_count(head.recent_check_count);
  out.set_recent_violation_count(head.recent_violation_count);
  out.set_level(head.level);
}

}  // namespace spillway

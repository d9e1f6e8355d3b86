#include "services/convert/attend.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/checks.h"
#include "engine/errors.h"
#include "host/base/status_macros.h"
#include "host/policy/methods.h"
#include "services/convert/policy.h"
#include "services/convert/tensor.h"

namespace spillway {
namespace {

// Bytes of a certificate per query and query head, at most: three varint counts, two floats and a
// promise.
constexpr int64_t kCertificateBytes = 3 * 10 + 2 * 4 + 1;
constexpr int64_t kFrameBytes = 1024;
constexpr int64_t kSelectedRowBytes = 4 + 4 + 1;

v1::Promise PromiseToProto(Promise promise) {
  switch (promise) {
    case Promise::kExact:
      return v1::PROMISE_EXACT;
    case Promise::kStatistical:
      return v1::PROMISE_STATISTICAL;
    case Promise::kNone:
      return v1::PROMISE_NONE;
  }
  return v1::PROMISE_UNSPECIFIED;
}

absl::Status CheckDType(DType dtype, const ModelSpec& spec, const std::string& field) {
  if (dtype == spec.dtype) return absl::OkStatus();
  return InvalidField(field, absl::StrCat(std::string(DTypeName(dtype)), " is not the model's ",
                                          std::string(DTypeName(spec.dtype))));
}

// Converts the rows of a chunk and where they belong, but not its layers.
absl::StatusOr<Chunk> RowsFromProto(const v1::KvChunk& rows, const ModelSpec& spec,
                                    const CallerRegions& regions) {
  const std::string path = "chunk.";
  Chunk out;
  int on_gpu = 0;
  std::vector<const Device*> gpus;
  for (const auto& [tensor, name, source, memory] :
       {std::tuple(&rows.k(), "k", &out.k, &out.k_memory),
        std::tuple(&rows.v(), "v", &out.v, &out.v_memory)}) {
    ASSIGN_OR_RETURN(const TensorView view,
                     ViewTensor(*tensor, {kAnyDim, spec.kv_head_count, kAnyDim, spec.head_dim},
                                regions, path + name, TensorMemory::kAny));
    RETURN_IF_ERROR(CheckDType(view.dtype, spec, absl::StrCat(path, name, ".dtype")));
    *source = {{view.data, view.strides[1], view.strides[2]}, view.strides[0]};
    *memory = view.region;
    out.shared_source |= view.region != nullptr;
    on_gpu += view.region != nullptr && view.region->on_gpu ? 1 : 0;
    gpus.push_back(view.region == nullptr ? nullptr : view.region->gpu());
  }
  if (on_gpu == 1) {
    return InvalidField(path + "v.slice.region", "only one of k and v is in GPU memory");
  }
  out.on_gpu = on_gpu == 2;
  out.gpu = out.on_gpu ? gpus[0] : nullptr;
  if (out.on_gpu && gpus[0] != gpus[1]) {
    return InvalidField(path + "v.slice.region", "k and v are in the memory of two GPUs");
  }
  const auto& k_shape = rows.k().shape();
  if (!std::equal(k_shape.begin(), k_shape.end(), rows.v().shape().begin())) {
    return InvalidField(path + "v.shape",
                        absl::StrCat("[", absl::StrJoin(rows.v().shape(), ", "),
                                     "] is not that of k, [", absl::StrJoin(k_shape, ", "), "]"));
  }
  if (rows.token_start() < 0) {
    return InvalidField(path + "token_start",
                        absl::StrCat("value ", rows.token_start(), " is negative"));
  }
  out.start = rows.token_start();
  out.count = k_shape[k_shape.size() - 2];
  out.generation = rows.generation();
  return out;
}

}  // namespace

absl::Status CheckLayer(int32_t layer, const ModelSpec& spec, const std::string& field) {
  if (layer >= 0 && layer < spec.layer_count) return absl::OkStatus();
  return InvalidField(field,
                      absl::StrCat("value ", layer, " is not in [0, ", spec.layer_count, ")"));
}

absl::StatusOr<Chunk> ChunkFromProto(const v1::KvChunk& chunk, const ModelSpec& spec,
                                     const CallerRegions& regions) {
  absl::StatusOr<Chunk> out = RowsFromProto(chunk, spec, regions);
  if (!out.ok()) return out;
  const int64_t layer_count = chunk.k().shape(0);
  if (chunk.layer_start() < 0 || chunk.layer_start() >= spec.layer_count ||
      layer_count > spec.layer_count - chunk.layer_start()) {
    return InvalidField("chunk.layer_start",
                        absl::StrCat(layer_count, " layers from ", chunk.layer_start(),
                                     " are not in [0, ", spec.layer_count, ")"));
  }
  out->layer_start = chunk.layer_start();
  out->layer_count = static_cast<int>(layer_count);
  if (!out->shared_source) {
    RETURN_IF_ERROR(CheckFinite(*out, spec, "chunk."));
  }
  return out;
}

absl::Status QueryFromProto(const v1::AttendItem& item, const CallerRegions& regions,
                            const std::string& path, AttendItem& out) {
  const Sequence& sequence = *out.sequence;
  const ModelSpec& spec = sequence.model->spec;
  AttendQuery& attend = out.attend;
  ASSIGN_OR_RETURN(
      const TensorView q,
      ViewTensor(item.q(), {kAnyDim, spec.query_head_count, spec.head_dim}, regions, path + "q"));
  attend.q_dtype = q.dtype;
  attend.q = q.data;
  attend.query_count = item.q().shape(0);
  if (attend.query_count > kQueryCountMax) {
    return InvalidField(
        path + "q.shape",
        absl::StrCat(attend.query_count, " queries are not in [1, ", kQueryCountMax, "]"));
  }
  const int visible_count = item.visible_token_counts_size();
  if (visible_count != 0 && visible_count != attend.query_count) {
    return InvalidField(
        path + "visible_token_counts",
        absl::StrCat(visible_count, " values for ", attend.query_count, " queries"));
  }
  attend.visible.assign(item.visible_token_counts().begin(), item.visible_token_counts().end());
  if (item.has_policy()) {
    ASSIGN_OR_RETURN(attend.policy,
                     ApplyPolicy(item.policy(), sequence.policy, spec, path + "policy."));
  } else {
    attend.policy = sequence.policy;
  }
  if (q.region != nullptr) {
    ASSIGN_OR_RETURN(
        const std::shared_ptr<const std::byte[]> copy,
        CopyOf(q, {item.q().shape().data(), static_cast<size_t>(item.q().shape_size())}));
    attend.q = copy.get();
    out.q_memory = copy;
  }
  return CheckFinite(attend, spec, path + "q");
}

absl::StatusOr<ResultPlaces> PlacesFromProto(const v1::AttendItem& item, v1::DType out_dtype,
                                             const AttendQuery& attend, const ModelSpec& spec,
                                             const CallerRegions& regions,
                                             const std::string& path) {
  ResultPlaces places;
  ASSIGN_OR_RETURN(places.out_dtype, OutDType(out_dtype, attend.q_dtype));
  const int64_t heads = attend.query_count * spec.query_head_count;
  if (item.has_out()) {
    ASSIGN_OR_RETURN(places.out, PlaceTensor(item.out(), heads * spec.head_dim, places.out_dtype,
                                             regions, path + "out"));
  }
  if (item.has_lse()) {
    ASSIGN_OR_RETURN(places.lse,
                     PlaceTensor(item.lse(), heads, DType::kF32, regions, path + "lse"));
  }
  return places;
}

absl::Status CheckSelectable(const AttendQuery& attend) {
  if (attend.query_count != 1) {
    return InvalidField("item.q.shape",
                        absl::StrCat(attend.query_count, " queries, not exactly one"));
  }
  if (const TailMethod& tail = MethodOf(attend.policy.tail); tail.per_query_head) {
    return InvalidField(
        "item.policy.tail",
        absl::StrCat("TAIL_", absl::AsciiStrToUpper(std::string(tail.name)),
                     " has a weight for each row and query head; only attends support it"));
  }
  return absl::OkStatus();
}

absl::StatusOr<DType> OutDType(v1::DType asked, DType q_dtype, const std::string& field) {
  if (asked == v1::DTYPE_UNSPECIFIED) return q_dtype;
  if (asked == v1::DTYPE_F32) return DType::kF32;
  return InvalidField(
      field, absl::StrCat("value ", static_cast<int>(asked), " is neither unset nor DTYPE_F32"));
}

int64_t ResultBytes(const AttendQuery& attend, const ModelSpec& spec, const ResultPlaces& places) {
  const int64_t heads = attend.query_count * spec.query_head_count;
  const int64_t out_bytes =
      places.out.region == nullptr ? int64_t{spec.head_dim} * DTypeBytes(places.out_dtype) : 0;
  return kFrameBytes + heads * (out_bytes + 4 + kCertificateBytes) +
         attend.query_count * spec.group_count() * 10;
}

void FillCertificate(const JobItem& item, v1::Certificate& certificate) {
  const int count = static_cast<int>(item.result.certificates.size());
  // Elements are written in place, because adding them one by one checks for room at each.
  const auto elements = [count](auto& field) {
    field.Resize(count, 0);
    return field.mutable_data();
  };
  int64_t* const visible = elements(*certificate.mutable_visible_token_counts());
  int64_t* const heavy = elements(*certificate.mutable_heavy_token_counts());
  int64_t* const sampled = elements(*certificate.mutable_sampled_token_counts());
  float* const errors = elements(*certificate.mutable_relative_errors());
  float* const masses = elements(*certificate.mutable_tail_masses());
  int* const promises = elements(*certificate.mutable_promises());
  for (int i = 0; i < count; ++i) {
    const Certificate& head = item.result.certificates[i];
    visible[i] = head.visible_token_count;
    heavy[i] = head.heavy_token_count;
    sampled[i] = head.sampled_token_count;
    errors[i] = head.relative_error;
    masses[i] = head.tail_mass;
    promises[i] = PromiseToProto(head.promise);
  }
  const Policy& policy = item.attend->policy;
  certificate.set_epsilon(policy.epsilon);
  certificate.set_delta(policy.delta);
  certificate.set_inflation(policy.inflation);
  for (const TailPolicy& tail : item.attend->tails) certificate.add_head_inflations(tail.inflation);
}

absl::Status FillResult(const Job& job, const JobItem& item, const ModelSpec& spec,
                        const ResultPlaces& places, v1::AttendResult& out) {
  const AttendResult& result = item.result;
  const int64_t query_count = item.attend->query_count;
  absl::Status status =
      FillTensor(result.out, places.out_dtype, {query_count, spec.query_head_count, spec.head_dim},
                 places.out, *out.mutable_out());
  status.Update(FillTensor(result.lse, DType::kF32, {query_count, spec.query_head_count},
                           places.lse, *out.mutable_lse()));
  if (status.ok()) {
    FillFacts(job, item, out);
  } else {
    out.Clear();
  }
  return status;
}

void FillFacts(const Job& job, const JobItem& item, v1::AttendResult& out) {
  const AttendResult& result = item.result;
  out.mutable_status();
  FillCertificate(item, *out.mutable_certificate());
  v1::AttendStatistics& statistics = *out.mutable_statistics();
  statistics.mutable_touched_row_counts()->Add(result.touched_row_counts.begin(),
                                               result.touched_row_counts.end());
  statistics.set_device_time_us(job.device_time_us);
  statistics.set_moved_row_count(result.moved_row_count);
}

absl::Status FillSelection(const AttendResult& result, v1::Selection& selection) {
  int64_t count = 0;
  selection.add_offsets(0);
  for (const Selection& head : result.selections) {
    count += static_cast<int64_t>(head.indices.size());
    selection.add_offsets(count);
  }
  if (count > (kMessageBytesMax - (64 << 10)) / kSelectedRowBytes) {
    return WithReason(absl::ResourceExhaustedError(
                          absl::StrCat(count, " selected rows do not fit in a message of at most ",
                                       (kMessageBytesMax - (64 << 10)) / kSelectedRowBytes)),
                      Reason::kResponseTooLarge, {{"row_count", absl::StrCat(count)}});
  }
  std::vector<uint32_t> indices;
  std::vector<float> log_weights;
  std::vector<uint8_t> strata;
  indices.reserve(count);
  log_weights.reserve(count);
  strata.reserve(count);
  for (const Selection& head : result.selections) {
    indices.insert(indices.end(), head.indices.begin(), head.indices.end());
    log_weights.insert(log_weights.end(), head.log_weights.begin(), head.log_weights.end());
    strata.insert(strata.end(), head.strata.begin(), head.strata.end());
  }
  FillTensor(indices, *selection.mutable_indices());
  FillTensor(log_weights, DType::kF32, {count}, *selection.mutable_log_weights());
  FillTensor(strata, *selection.mutable_strata());
  return absl::OkStatus();
}

}  // namespace spillway

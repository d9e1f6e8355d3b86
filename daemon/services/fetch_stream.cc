#include "daemon/services/fetch_stream.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/convert/attend.h"
#include "daemon/convert/lookup.h"
#include "daemon/convert/tensor.h"
#include "daemon/engine/errors.h"
#include "daemon/services/attend_call.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

constexpr int64_t kMessageBytes = (int64_t{1} << 20) - (64 << 10);
// Index, log-weight and stratum of a row.
constexpr int64_t kRowExtraBytes = 9;

}  // namespace

FetchStream::FetchStream(const ServiceContext& services, const grpc::CallbackServerContext& context,
                         const v1::FetchPagesRequest& request)
    : services_(services), cancel_(MakeCancelToken(context)) {
  absl::StatusOr<MemoryReservation> reservation =
      services_.engine.budget().Reserve(kMessageBytes, "a stream of rows", MemoryUse::kMessages);
  absl::Status status = reservation.status();
  if (status.ok()) {
    reservation_ = *std::move(reservation);
    status = request.has_selection() ? StartGiven(request) : StartChoice(request);
  }
  if (!status.ok()) Finish(services_.status.ToGrpc(status));
}

absl::Status FetchStream::StartChoice(const v1::FetchPagesRequest& request) {
  ASSIGN_OR_RETURN(AttendItem item, ItemFromProto(services_, request.item(), "item."));
  model_ = item.sequence->model;
  RETURN_IF_ERROR(CheckLayer(request.layer(), model_->spec));
  RETURN_IF_ERROR(CheckSelectable(item.attend));
  AttendRequest work;
  work.layer = request.layer();
  work.cancel = cancel_;
  work.select_only = true;
  work.share_rows = true;
  work.items.push_back(std::move(item));
  services_.engine.Attend(std::move(work), [this](absl::StatusOr<AttendOutcome> outcome) {
    if (!outcome.ok()) return Finish(services_.status.ToGrpc(outcome.status()));
    JobItem& chosen = outcome->job->items.front();
    if (!chosen.status.ok()) return Finish(services_.status.ToGrpc(chosen.status));
    weighted_ = true;
    selections_ = std::move(chosen.result.selections);
    rows_ = std::move(outcome->rows.front());
    WriteNext();
  });
  return absl::OkStatus();
}

absl::Status FetchStream::StartGiven(const v1::FetchPagesRequest& request) {
  ASSIGN_OR_RETURN(std::shared_ptr<Sequence> sequence,
                   FindSequence(services_.engine, request.item().sequence(), "item.sequence"));
  model_ = sequence->model;
  RETURN_IF_ERROR(CheckLayer(request.layer(), model_->spec));
  RETURN_IF_ERROR(ParseGiven(request.selection(), model_->spec));
  services_.engine.ShareRows(std::move(sequence), request.layer(),
                             [this](absl::StatusOr<LayerRows> rows) {
                               absl::Status status = rows.ok() ? CheckGiven(*rows) : rows.status();
                               if (!status.ok()) return Finish(services_.status.ToGrpc(status));
                               rows_ = *std::move(rows);
                               WriteNext();
                             });
  return absl::OkStatus();
}

absl::Status FetchStream::ParseGiven(const v1::Selection& selection, const ModelSpec& spec) {
  if (selection.offsets_size() != spec.kv_head_count + 1 || selection.offsets(0) != 0) {
    return InvalidField("selection.offsets",
                        absl::StrCat("are not ", spec.kv_head_count + 1, " values from 0"));
  }
  const v1::Tensor& tensor = selection.indices();
  const int64_t count = selection.offsets(spec.kv_head_count);
  if (tensor.dtype() != v1::DTYPE_U32) {
    return InvalidField("selection.indices.dtype", "is not DTYPE_U32");
  }
  if (tensor.shape_size() != 1 || tensor.shape(0) != count) {
    return InvalidField("selection.indices.shape",
                        absl::StrCat("is not [", count, "], the last offset"));
  }
  // By division: count * 4 may overflow.
  if (tensor.data().size() % sizeof(uint32_t) != 0 ||
      static_cast<int64_t>(tensor.data().size() / sizeof(uint32_t)) != count) {
    return InvalidField("selection.indices.data",
                        absl::StrCat(tensor.data().size(), " bytes for ", count, " indices"));
  }
  selections_.resize(spec.kv_head_count);
  for (int h = 0; h < spec.kv_head_count; ++h) {
    const int64_t begin = selection.offsets(h);
    const int64_t end = selection.offsets(h + 1);
    if (end < begin || end > count) {
      return InvalidField(absl::StrCat("selection.offsets[", h + 1, "]"),
                          absl::StrCat("value ", end, " is not in [", begin, ", ", count, "]"));
    }
    std::vector<uint32_t>& indices = selections_[h].indices;
    indices.resize(static_cast<size_t>(end - begin));
    if (indices.empty()) continue;
    std::memcpy(indices.data(), tensor.data().data() + begin * sizeof(uint32_t),
                indices.size() * sizeof(uint32_t));
    for (size_t i = 1; i < indices.size(); ++i) {
      if (indices[i] > indices[i - 1]) continue;
      return InvalidField("selection.indices",
                          absl::StrCat("KV head ", h, ": ", indices[i], " after ", indices[i - 1],
                                       " is not ascending"));
    }
  }
  return absl::OkStatus();
}

absl::Status FetchStream::CheckGiven(const LayerRows& rows) const {
  for (size_t h = 0; h < selections_.size(); ++h) {
    const std::vector<uint32_t>& indices = selections_[h].indices;
    if (indices.empty() || indices.back() < rows.token_count()) continue;
    return WithReason(absl::OutOfRangeError(
                          absl::StrCat("selection.indices: KV head ", h, ": token ", indices.back(),
                                       " is not below the layer's length ", rows.token_count())),
                      "TOKEN_OUT_OF_RANGE",
                      {{"layer_token_count", absl::StrCat(rows.token_count())}});
  }
  return absl::OkStatus();
}

void FetchStream::WriteNext() {
  while (head_ < selections_.size() && row_ == selections_[head_].indices.size()) {
    ++head_;
    row_ = 0;
  }
  if (absl::Status status = cancel_->Check(); !status.ok()) {
    return Finish(services_.status.ToGrpc(status));
  }
  if (head_ == selections_.size()) return Finish(grpc::Status::OK);
  const Selection& selection = selections_[head_];
  const int64_t row_bytes = rows_->row_bytes();
  const size_t count = std::min(selection.indices.size() - row_,
                                static_cast<size_t>(kMessageBytes / (row_bytes + kRowExtraBytes)));
  response_.Clear();
  response_.set_kv_head(static_cast<int32_t>(head_));
  FillTensor(std::span(selection.indices).subspan(row_, count), *response_.mutable_indices());
  v1::Tensor& rows = *response_.mutable_rows();
  rows.set_dtype(ToProto(model_->spec.dtype));
  rows.add_shape(static_cast<int64_t>(count));
  rows.add_shape(2);
  rows.add_shape(model_->spec.head_dim);
  std::string& data = *rows.mutable_data();
  data.resize(count * static_cast<size_t>(row_bytes));
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(data.data() + i * row_bytes,
                rows_->Row(static_cast<int>(head_), selection.indices[row_ + i]),
                static_cast<size_t>(row_bytes));
  }
  v1::Tensor& log_weights = *response_.mutable_log_weights();
  if (weighted_) {
    FillTensor(std::span(selection.log_weights).subspan(row_, count), DType::kF32,
               {static_cast<int64_t>(count)}, log_weights);
    FillTensor(std::span(selection.strata).subspan(row_, count), *response_.mutable_strata());
  } else {
    FillTensor(std::vector<float>(count, 0.0f), DType::kF32, {static_cast<int64_t>(count)},
               log_weights);
  }
  row_ += count;
  StartWrite(&response_);
}

void FetchStream::OnWriteDone(bool ok) {
  if (ok) return WriteNext();
  Finish(grpc::Status(grpc::StatusCode::CANCELLED, "the client has gone"));
}

}  // namespace spillway

#include "services/fetch_stream.h"

#include <grpc/grpc.h>

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/checks.h"
#include "engine/errors.h"
#include "host/base/status_macros.h"
#include "services/convert/attend.h"
#include "services/convert/lookup.h"
#include "services/convert/tensor.h"

namespace spillway {
namespace {

constexpr int64_t kMessageBytes = (int64_t{1} << 20) - (64 << 10);
constexpr int64_t kIndexBytes = 4;  // of a row

}  // namespace

FetchStream::FetchStream(const ServiceContext& services, grpc::CallbackServerContext& context,
                         Caller caller, const absl::StatusOr<const v1::FetchPagesRequest*>& request)
    : services_(services),
      context_(context),
      caller_(std::move(caller)),
      cancel_(MakeCancelToken(context)),
      idle_(services.limits.stream_idle_max()) {
  absl::Status status = services_.streams.Add(this);
  if (status.ok()) status = request.ok() ? Start(**request) : request.status();
  if (!status.ok()) Finish(services_.status.ToGrpc(status, caller_.trace()));
}

void FetchStream::OnDone() {
  services_.streams.Remove(this);
  delete this;
}

absl::Status FetchStream::Start(const v1::FetchPagesRequest& request) {
  ASSIGN_OR_RETURN(reservation_, services_.engine.budget().Reserve(
                                     kMessageBytes, "a stream of rows", MemoryUse::kMessages));
  ASSIGN_OR_RETURN(std::shared_ptr<Sequence> sequence,
                   FindSequence(services_.engine, caller_, request.sequence(), "sequence"));
  model_ = sequence->model;
  RETURN_IF_ERROR(CheckLayer(request.layer(), model_->spec));
  ASSIGN_OR_RETURN(choice_, ChoiceFromProto(request, model_->spec));
  RETURN_IF_ERROR(ParseTargets(request));
  services_.engine.ShareRows(
      sequence, request.layer(), [this, sequence](absl::StatusOr<SharedRows> shared) {
        absl::Status status =
            shared.ok() ? CheckTokens(choice_, shared->rows.token_count()) : shared.status();
        if (status.ok() && k_.has_value() && k_->region->gpu() != nullptr) {
          status = CheckHome(*k_->region->gpu(), *shared->device, *sequence, "k");
        }
        if (!status.ok()) return Finish(services_.status.ToGrpc(status, caller_.trace()));
        if (k_.has_value()) return CopyRows(*std::move(shared));
        rows_ = std::move(shared->rows);
        WriteNext();
      });
  return absl::OkStatus();
}

absl::Status FetchStream::ParseTargets(const v1::FetchPagesRequest& request) {
  if (request.has_k() != request.has_v()) {
    return InvalidField(request.has_k() ? "v" : "k",
                        "is not set, but the other is: set both k and v, or neither");
  }
  if (!request.has_k()) return absl::OkStatus();
  const ModelSpec& spec = model_->spec;
  int64_t row_count = 0;
  for (int h = 0; choice_.lists && h < spec.kv_head_count; ++h) row_count += choice_.CountOf(h);
  const std::array<int64_t, 3> ranged = {spec.kv_head_count, choice_.count, spec.head_dim};
  const std::array<int64_t, 2> chosen = {row_count, spec.head_dim};
  const std::span<const int64_t> shape = choice_.lists ? std::span<const int64_t>(chosen) : ranged;
  ASSIGN_OR_RETURN(
      k_, TargetOf(request.k(), shape, spec.dtype, CallerRegions(services_.regions, caller_), "k",
                   TensorMemory::kAny));
  ASSIGN_OR_RETURN(
      v_, TargetOf(request.v(), shape, spec.dtype, CallerRegions(services_.regions, caller_), "v",
                   TensorMemory::kAny));
  if (k_->region->on_gpu != v_->region->on_gpu) {
    return InvalidField("v.region", "only one of k and v is in GPU memory");
  }
  if (k_->region->gpu() == v_->region->gpu()) return absl::OkStatus();
  return InvalidField("v.region", "k and v are in the memory of two GPUs");
}

void FetchStream::CopyRows(SharedRows shared) {
  // The last dimension is a row; the one before is tokens, or with lists all rows.
  const auto rows_at = [&](const TensorTarget& target) {
    return choice_.lists ? RowTarget{target.data, 0, target.strides[0]}
                         : RowTarget{target.data, target.strides[0], target.strides[1]};
  };
  work_.emplace(FetchWork{.rows = std::move(shared.rows),
                          .start = choice_.start,
                          .count = choice_.count,
                          .k = rows_at(*k_),
                          .v = rows_at(*v_),
                          .on_gpu = k_->region->on_gpu,
                          .cancel = cancel_});
  work_->chosen = std::move(choice_.lists);
  Device& device = work_->on_gpu ? *shared.device : services_.engine.device();
  device.Fetch(*work_, [this](absl::Status status) {
    work_.reset();
    Finish(services_.status.ToGrpc(status, caller_.trace()));
  });
}

void FetchStream::WriteNext() {
  const int heads = model_->spec.kv_head_count;
  while (head_ < heads && row_ == choice_.CountOf(head_)) {
    ++head_;
    row_ = 0;
  }
  if (absl::Status status = cancel_->Check(); !status.ok()) {
    return Finish(services_.status.ToGrpc(status, caller_.trace()));
  }
  if (head_ == heads) return Finish(grpc::Status::OK);
  const int64_t row_bytes = rows_->format().element_bytes();
  const int64_t count =
      std::min(choice_.CountOf(head_) - row_, kMessageBytes / (row_bytes + kIndexBytes));
  response_.Clear();
  response_.set_kv_head(head_);
  std::vector<uint32_t> tokens(count);
  for (int64_t i = 0; i < count; ++i) tokens[i] = choice_.Token(head_, row_ + i);
  FillTensor(std::span<const uint32_t>(tokens), *response_.mutable_indices());
  v1::Tensor& rows = *response_.mutable_rows();
  rows.set_dtype(ToProto(model_->spec.dtype));
  rows.add_shape(count);
  rows.add_shape(2);
  rows.add_shape(model_->spec.head_dim);
  std::string& data = *rows.mutable_data();
  data.resize(static_cast<size_t>(count * row_bytes));
  for (int64_t i = 0; i < count; ++i) {
    auto* const row = reinterpret_cast<std::byte*>(data.data() + i * row_bytes);
    rows_->ReadRow(head_, tokens[i], row, row + row_bytes / 2);
  }
  row_ += count;
  {
    const MutexLock lock(mutex_);
    idle_.Renew();
    writing_ = true;
  }
  StartWrite(&response_);
}

void FetchStream::OnWriteDone(bool ok) {
  grpc::Status cut_off;
  {
    const MutexLock lock(mutex_);
    writing_ = false;
    cut_off = cut_off_;
  }
  if (!cut_off.ok()) return Finish(cut_off);
  if (ok) return WriteNext();
  Finish(grpc::Status(grpc::StatusCode::CANCELLED, "the client has gone"));
}

void FetchStream::CheckIdle(Clock::time_point now) {
  std::string message;
  std::optional<LayerRows> rows;
  {
    const MutexLock lock(mutex_);
    const absl::Status status = writing_ ? idle_.CheckReader(now) : absl::OkStatus();
    if (status.ok()) return;
    writing_ = false;
    cut_off_ = services_.status.ToGrpc(status, caller_.trace());
    message = cut_off_.error_message();
    // While a write is pending, no other thread uses the rows. The write may stay pending for long:
    // a client process that is stopped does not even read the status. So free the rows now.
    rows.swap(rows_);
  }
  // Finish would queue its status behind data that the client does not read. This sends a status
  // before them and makes the write fail. The stream still exists: OnDone waits for the lock of the
  // set of streams, which the caller holds.
  grpc_call_cancel_with_status(context_.c_call(), GRPC_STATUS_ABORTED, message.c_str(), nullptr);
}

}  // namespace spillway

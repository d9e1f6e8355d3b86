#include "services/upload_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/errors.h"
#include "host/base/status_macros.h"
#include "services/convert/lookup.h"
#include "services/convert/model.h"

namespace spillway {
namespace {

constexpr int64_t kUploadBytesMax = int64_t{1} << 30;
constexpr int64_t kPieceBytesMax = int64_t{2} << 20;
constexpr char kUpload[] = "the upload of hash weights";

}  // namespace

UploadStream::UploadStream(const ServiceContext& services,
                           const grpc::CallbackServerContext& context, Caller caller,
                           v1::UploadHashWeightsResponse* response)
    : services_(services),
      caller_(std::move(caller)),
      response_(response),
      cancel_(MakeCancelToken(context)),
      charge_(services.engine.accounts().Of(caller_.name_space())),
      idle_(services.limits.stream_idle_max()) {
  if (absl::Status status = services_.streams.Add(this); !status.ok()) {
    End(status);
  } else {
    Read();
  }
}

void UploadStream::OnDone() {
  services_.streams.Remove(this);
  delete this;
}

void UploadStream::Read() {
  {
    const MutexLock lock(mutex_);
    idle_.Renew();
    reading_ = true;
  }
  StartRead(&received_);
}

void UploadStream::CheckIdle(Clock::time_point now) {
  absl::Status status;
  {
    const MutexLock lock(mutex_);
    if (!reading_) return;
    status = idle_.Check(now);
    if (status.ok()) return;
    reading_ = false;
  }
  End(status);
}

absl::Status UploadStream::Begin(const v1::UploadHashWeightsRequest& request) {
  ASSIGN_OR_RETURN(std::shared_ptr<Model> model,
                   FindModel(services_.engine, caller_, request.name(), "name"));
  total_bytes_ = request.total_bytes();
  if (total_bytes_ < 1 || total_bytes_ > kUploadBytesMax) {
    return InvalidField("total_bytes", absl::StrCat("value ", total_bytes_, " is not in [1, ",
                                                    kUploadBytesMax, "]"));
  }
  const MemoryBudget& budget = services_.engine.budget();
  const int64_t most = budget.limit_bytes() - budget.message_bytes();
  if (total_bytes_ > most) {
    return budget.Exhausted(kUpload, total_bytes_, most, MemoryUse::kModels);
  }
  if (model->ready()) {
    return WithReason(
        absl::FailedPreconditionError(absl::StrCat(model->name, " does not wait for hash weights")),
        Reason::kWeightsNotAwaited);
  }
  if (model->uploading.test_and_set(std::memory_order_acquire)) {
    return WithReason(
        absl::AbortedError(absl::StrCat("another upload to ", model->name, " is in progress")),
        Reason::kUploadUnderWay);
  }
  model_ = std::move(model);
  owns_upload_ = true;
  // Reserves only addresses: the pages are allocated when they are written, and are charged as the
  // bytes arrive.
  file_.reserve(static_cast<size_t>(total_bytes_));
  return absl::OkStatus();
}

absl::Status UploadStream::Take() {
  ASSIGN_OR_RETURN(const MemoryReservation message,
                   ChargeMessage(received_, services_.engine.budget()));
  v1::UploadHashWeightsRequest request;
  RETURN_IF_ERROR(ParseMessage(received_, request));
  if (model_ == nullptr) {
    RETURN_IF_ERROR(Begin(request));
  }
  const std::string& data = request.data();
  const int64_t bytes = static_cast<int64_t>(data.size());
  if (bytes > kPieceBytesMax) {
    return InvalidField("data", absl::StrCat(bytes, " bytes are more than ", kPieceBytesMax));
  }
  if (bytes > total_bytes_ - static_cast<int64_t>(file_.size())) {
    return InvalidField("data", absl::StrCat("more bytes than total_bytes ", total_bytes_));
  }
  RETURN_IF_ERROR(charge_.Add(bytes));
  ASSIGN_OR_RETURN(MemoryReservation more,
                   services_.engine.budget().Reserve(bytes, kUpload, MemoryUse::kModels));
  reservation_.Absorb(std::move(more));
  const auto* begin = reinterpret_cast<const std::byte*>(data.data());
  file_.insert(file_.end(), begin, begin + data.size());
  return absl::OkStatus();
}

void UploadStream::OnReadDone(bool ok) {
  {
    const MutexLock lock(mutex_);
    if (!reading_) return;  // the stream has ended
    reading_ = false;
  }
  if (!ok) {
    services_.background.enqueue([this] { Complete(); });
    return;
  }
  if (absl::Status status = Take(); !status.ok()) return End(status);
  Read();
}

void UploadStream::Complete() {
  absl::Status status;
  if (model_ == nullptr) {
    status = InvalidField("name", "the stream had no message");
  } else if (static_cast<int64_t>(file_.size()) != total_bytes_) {
    status = InvalidField("total_bytes", absl::StrCat("the upload ended after ", file_.size(),
                                                      " of ", total_bytes_, " bytes"));
  } else {
    status = services_.engine.UploadWeights(*model_, file_, cancel_.get());
  }
  if (status.ok()) *response_->mutable_model() = ToProto(*model_, services_.engine);
  End(status);
}

void UploadStream::End(const absl::Status& status) {
  // Before the client gets the answer, because it may then try again.
  file_ = {};
  reservation_.Release();
  charge_.Settle(0);
  if (owns_upload_) model_->uploading.clear(std::memory_order_release);
  Finish(services_.status.ToGrpc(status, caller_.trace()));
}

}  // namespace spillway

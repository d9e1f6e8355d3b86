#include "spillway/decode_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "spillway/call_context.h"
#include "spillway/error.h"

namespace spillway {

DecodeStream::DecodeStream(std::unique_ptr<CallContext> context, v1::AttentionService::Stub& stub)
    : context_(std::move(context)), stream_(stub.Decode(context_->get())) {}

DecodeStream::~DecodeStream() {
  if (finished_) return;
  context_->get()->TryCancel();
  stream_->Finish();
}

absl::Status DecodeStream::Send(const v1::DecodeRequest& request) {
  if (stream_->Write(request)) return absl::OkStatus();
  return absl::UnavailableError("the decode stream has ended");
}

absl::Status DecodeStream::Receive(v1::DecodeResponse& response) {
  if (stream_->Read(&response)) return absl::OkStatus();
  return absl::UnavailableError("the decode stream has ended");
}

absl::Status DecodeStream::Step(const v1::DecodeRequest& request, v1::DecodeResponse& response) {
  if (absl::Status status = Send(request); !status.ok()) return status;
  if (absl::Status status = Receive(response); !status.ok()) return status;
  if (response.correlation_id() == request.correlation_id()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the answer has correlation id ", response.correlation_id(), ", not ",
                   request.correlation_id(), ": another request was unanswered"));
}

absl::Status DecodeStream::Finish() {
  stream_->WritesDone();
  v1::DecodeResponse response;
  while (stream_->Read(&response)) {
  }
  finished_ = true;
  return ToAbslStatus(stream_->Finish());
}

}  // namespace spillway

#include "spillway/step_stream.h"

#include <utility>

#include "spillway/call_context.h"
#include "spillway/error.h"

namespace spillway {

StepStream::StepStream(std::unique_ptr<CallContext> context, v1::AttentionService::Stub& stub)
    : context_(std::move(context)), stream_(stub.Step(context_->get())) {}

StepStream::~StepStream() {
  if (finished_) return;
  context_->get()->TryCancel();
  stream_->Finish();
}

absl::Status StepStream::Send(const v1::StepRequest& request) {
  if (stream_->Write(request)) return absl::OkStatus();
  return absl::UnavailableError("the stream of steps has ended");
}

absl::Status StepStream::Receive(v1::StepResponse& response) {
  if (stream_->Read(&response)) return absl::OkStatus();
  return absl::UnavailableError("the stream of steps has ended");
}

absl::Status StepStream::Attend(const v1::StepRequest& request, v1::StepResponse& response) {
  if (absl::Status status = Send(request); !status.ok()) return status;
  return Receive(response);
}

absl::Status StepStream::Finish() {
  stream_->WritesDone();
  v1::StepResponse response;
  while (stream_->Read(&response)) {
  }
  finished_ = true;
  return ToAbslStatus(stream_->Finish());
}

}  // namespace spillway

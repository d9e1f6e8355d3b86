// A long-lived stream of decode steps: appends the new K/V of sequences, layer by layer, and
// attends.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "spillway/v1/attention_service.grpc.pb.h"

namespace spillway {

class CallContext;

// One thread may send while another one receives, but only one of each at a time.
// Call Finish and the destructor only after both have returned.
class StepStream {
 public:
  StepStream(std::unique_ptr<CallContext> context, v1::AttentionService::Stub& stub);
  // Cancels a stream that was not finished.
  ~StepStream();

  StepStream(const StepStream&) = delete;
  StepStream& operator=(const StepStream&) = delete;

  // Sends a request. Blocks while the daemon does not read. UNAVAILABLE if the
  // stream has ended: Finish tells why.
  absl::Status Send(const v1::StepRequest& request);

  // Waits for the next answer and writes it to `response`. To reuse memory, pass
  // the same object each time. UNAVAILABLE if the stream has ended.
  absl::Status Receive(v1::StepResponse& response);

  // Attends at a layer whose request and answer are one message each. If the
  // attend fails, the error is in the status of the answer, and the stream stays
  // open.
  // REQUIRES: no other request is unanswered.
  absl::Status Attend(const v1::StepRequest& request, v1::StepResponse& response);

  // Tells the daemon that there are no more requests, drops the remaining answers,
  // and returns the status of the stream. Call it once.
  absl::Status Finish();

 private:
  std::unique_ptr<CallContext> context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::StepRequest, v1::StepResponse>> stream_;
  bool finished_ = false;
};

}  // namespace spillway

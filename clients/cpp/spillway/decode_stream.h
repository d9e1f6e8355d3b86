// A long-lived stream that appends a layer's new K/V and attends to it.
#pragma once

#include <memory>
#include <stop_token>

#include "absl/status/status.h"
#include "spillway/v1/attention_service.grpc.pb.h"

namespace spillway {

class CallContext;

// One thread may send while another one receives, but only one of each at a time.
// Call Finish and the destructor only after both have returned.
class DecodeStream {
 public:
  DecodeStream(std::unique_ptr<CallContext> context, v1::AttentionService::Stub& stub);
  // Cancels a stream that was not finished.
  ~DecodeStream();

  DecodeStream(const DecodeStream&) = delete;
  DecodeStream& operator=(const DecodeStream&) = delete;

  // Sends a request. Blocks while the daemon does not read. UNAVAILABLE if the
  // stream has ended: Finish tells why.
  absl::Status Send(const v1::DecodeRequest& request);

  // Waits for the next answer and writes it to `response`. To reuse memory, pass
  // the same object each time. The answers for one sequence come in the order of
  // its requests. UNAVAILABLE if the stream has ended.
  absl::Status Receive(v1::DecodeResponse& response);

  // Sends a request and waits for its answer. If the request itself fails, the
  // error is in the status of the result, and the stream stays open.
  // FAILED_PRECONDITION if the answer is for another request.
  // REQUIRES: no other request is unanswered.
  absl::Status Step(const v1::DecodeRequest& request, v1::DecodeResponse& response);

  // Tells the daemon that there are no more requests, drops the remaining answers,
  // and returns the status of the stream. Call it once.
  absl::Status Finish();

 private:
  std::unique_ptr<CallContext> context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::DecodeRequest, v1::DecodeResponse>> stream_;
  bool finished_ = false;
};

}  // namespace spillway

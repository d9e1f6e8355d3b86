// A long-lived stream that appends a layer's new K/V and attends to it.
#pragma once

#include <memory>
#include <stop_token>

#include "absl/status/status.h"
#include "spillway/v1/attention_service.grpc.pb.h"

namespace spillway {

class CallContext;

// One thread may send while another receives; no more than one of each at a
// time. Finish and the destructor need both to have ended.
class DecodeStream {
 public:
  DecodeStream(std::unique_ptr<CallContext> context, v1::AttentionService::Stub& stub);
  // Cancels a stream that was not finished.
  ~DecodeStream();

  DecodeStream(const DecodeStream&) = delete;
  DecodeStream& operator=(const DecodeStream&) = delete;

  // Sends a request; blocks while the daemon is behind. UNAVAILABLE when the
  // stream has ended: Finish tells why.
  absl::Status Send(const v1::DecodeRequest& request);

  // Waits for the next answer, which replaces what `response` holds; a loop
  // that gives the same one each time has its memory used again. Answers of
  // one sequence come in the order of its requests. UNAVAILABLE when the
  // stream has ended.
  absl::Status Receive(v1::DecodeResponse& response);

  // Sends and waits for the answer. An error of the request itself is in its
  // result's status and leaves the stream open. FAILED_PRECONDITION when the
  // answer is to another request.
  // REQUIRES: no other request is unanswered.
  absl::Status Step(const v1::DecodeRequest& request, v1::DecodeResponse& response);

  // Tells the daemon that no more comes, drops answers not received, and
  // returns how the stream ended. Call it once.
  absl::Status Finish();

 private:
  std::unique_ptr<CallContext> context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::DecodeRequest, v1::DecodeResponse>> stream_;
  bool finished_ = false;
};

}  // namespace spillway

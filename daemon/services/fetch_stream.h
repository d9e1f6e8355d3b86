#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "daemon/services/call.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

// One FetchPages: the rows are chosen and shared in the sequence's turn, then
// streamed at the client's pace while the sequence goes on.
class FetchStream final : public grpc::ServerWriteReactor<v1::FetchPagesResponse> {
 public:
  FetchStream(const ServiceContext& services, const grpc::CallbackServerContext& context,
              const v1::FetchPagesRequest& request);

 private:
  void OnWriteDone(bool ok) override;
  void OnCancel() override { cancel_->Cancel(); }
  void OnDone() override { delete this; }

  absl::Status StartChoice(const v1::FetchPagesRequest& request);
  absl::Status StartGiven(const v1::FetchPagesRequest& request);
  // Checks the client's choice, all but what needs the layer's length.
  absl::Status ParseGiven(const v1::Selection& selection, const ModelSpec& spec);
  absl::Status CheckGiven(const LayerRows& rows) const;
  // Writes the next rows, or ends the call.
  void WriteNext();

  const ServiceContext& services_;
  const std::shared_ptr<CancelToken> cancel_;
  std::shared_ptr<Model> model_;
  std::optional<LayerRows> rows_;
  bool weighted_ = false;              // the daemon chose
  std::vector<Selection> selections_;  // per KV head
  size_t head_ = 0;
  size_t row_ = 0;  // next of the head's selection
  MemoryReservation reservation_;
  v1::FetchPagesResponse response_;
};

}  // namespace spillway

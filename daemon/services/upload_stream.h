#pragma once

#include <memory>
#include <vector>

#include "daemon/services/context.h"
#include "grpcpp/grpcpp.h"
#include "spillway/v1/model_service.pb.h"

namespace spillway {

// One upload of hash weights: collects the file, then hands it to the engine.
// A model takes one upload at a time.
class UploadStream final : public grpc::ServerReadReactor<v1::UploadHashWeightsRequest> {
 public:
  UploadStream(const ServiceContext& services, v1::UploadHashWeightsResponse* response);

 private:
  void OnReadDone(bool ok) override;
  void OnDone() override { delete this; }

  // Takes the message that was read.
  absl::Status Take();
  absl::Status Begin();
  void Complete();
  // Gives up what the upload holds, and answers.
  void End(const absl::Status& status);

  const ServiceContext& services_;
  v1::UploadHashWeightsResponse* const response_;
  v1::UploadHashWeightsRequest request_;
  std::shared_ptr<Model> model_;
  bool owns_upload_ = false;  // of model_->uploading
  MemoryReservation reservation_;
  std::vector<std::byte> file_;
  int64_t total_bytes_ = 0;
};

}  // namespace spillway

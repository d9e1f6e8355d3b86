#pragma once

#include "daemon/services/context.h"
#include "spillway/v1/memory_service.grpc.pb.h"

namespace spillway {

class MemoryService final : public v1::MemoryService::CallbackService {
 public:
  explicit MemoryService(const ServiceContext& services) : services_(services) {}

  grpc::ServerUnaryReactor* AttachRegion(grpc::CallbackServerContext* context,
                                         const v1::AttachRegionRequest* request,
                                         v1::AttachRegionResponse* response) override;
  grpc::ServerUnaryReactor* ListRegions(grpc::CallbackServerContext* context,
                                        const v1::ListRegionsRequest* request,
                                        v1::ListRegionsResponse* response) override;
  grpc::ServerUnaryReactor* DetachRegion(grpc::CallbackServerContext* context,
                                         const v1::DetachRegionRequest* request,
                                         v1::DetachRegionResponse* response) override;
  grpc::ServerUnaryReactor* AttachDoorbell(grpc::CallbackServerContext* context,
                                           const v1::AttachDoorbellRequest* request,
                                           v1::AttachDoorbellResponse* response) override;

 private:
  // Answers with the region that `attach` makes.
  template <typename Response, typename Attach>
  grpc::ServerUnaryReactor* AnswerAttached(grpc::CallbackServerContext* context, Response& response,
                                           Attach attach);

  const ServiceContext& services_;
};

}  // namespace spillway

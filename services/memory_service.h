#pragma once

#include "services/service.h"
#include "spillway/v1/memory_service.pb.h"

namespace spillway {

class MemoryService final : public Service {
 public:
  explicit MemoryService(const ServiceContext& services);

 private:
  grpc::ServerUnaryReactor* AttachRegion(grpc::CallbackServerContext* context, const Caller& caller,
                                         const v1::AttachRegionRequest* request,
                                         v1::AttachRegionResponse* response);
  grpc::ServerUnaryReactor* ListRegions(grpc::CallbackServerContext* context, const Caller& caller,
                                        const v1::ListRegionsRequest* request,
                                        v1::ListRegionsResponse* response);
  grpc::ServerUnaryReactor* DetachRegion(grpc::CallbackServerContext* context, const Caller& caller,
                                         const v1::DetachRegionRequest* request,
                                         v1::DetachRegionResponse* response);
  grpc::ServerUnaryReactor* AttachDoorbell(grpc::CallbackServerContext* context,
                                           const Caller& caller,
                                           const v1::AttachDoorbellRequest* request,
                                           v1::AttachDoorbellResponse* response);

  // Runs `attach` in the background, and answers with its region.
  template <typename Response, typename Attach>
  grpc::ServerUnaryReactor* AnswerAttached(grpc::CallbackServerContext* context, Response& response,
                                           Attach attach);
};

}  // namespace spillway

#pragma once

#include "daemon/services/context.h"
#include "spillway/v1/model_service.grpc.pb.h"

namespace spillway {

class ModelService final : public v1::ModelService::CallbackService {
 public:
  explicit ModelService(const ServiceContext& services) : services_(services) {}

  grpc::ServerUnaryReactor* CreateModel(grpc::CallbackServerContext* context,
                                        const v1::CreateModelRequest* request,
                                        v1::CreateModelResponse* response) override;
  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const v1::GetModelRequest* request,
                                     v1::GetModelResponse* response) override;
  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* context,
                                       const v1::ListModelsRequest* request,
                                       v1::ListModelsResponse* response) override;
  grpc::ServerUnaryReactor* DeleteModel(grpc::CallbackServerContext* context,
                                        const v1::DeleteModelRequest* request,
                                        v1::DeleteModelResponse* response) override;
  grpc::ServerReadReactor<v1::UploadHashWeightsRequest>* UploadHashWeights(
      grpc::CallbackServerContext* context, v1::UploadHashWeightsResponse* response) override;

 private:
  const ServiceContext& services_;
};

}  // namespace spillway

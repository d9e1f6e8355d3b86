#pragma once

#include "services/service.h"
#include "spillway/v1/model_service.pb.h"

namespace spillway {

class ModelService final : public Service {
 public:
  explicit ModelService(const ServiceContext& services);

 private:
  grpc::ServerUnaryReactor* CreateModel(grpc::CallbackServerContext* context, const Caller& caller,
                                        const v1::CreateModelRequest* request,
                                        v1::CreateModelResponse* response);
  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context, const Caller& caller,
                                     const v1::GetModelRequest* request,
                                     v1::GetModelResponse* response);
  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* context, const Caller& caller,
                                       const v1::ListModelsRequest* request,
                                       v1::ListModelsResponse* response);
  grpc::ServerUnaryReactor* DeleteModel(grpc::CallbackServerContext* context, const Caller& caller,
                                        const v1::DeleteModelRequest* request,
                                        v1::DeleteModelResponse* response);
};

}  // namespace spillway

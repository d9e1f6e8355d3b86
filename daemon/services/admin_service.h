#pragma once

#include "daemon/services/context.h"
#include "spillway/v1/admin_service.grpc.pb.h"

namespace spillway {

class AdminService final : public v1::AdminService::CallbackService {
 public:
  explicit AdminService(const ServiceContext& services) : services_(services) {}

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest* request,
                                          v1::GetServerInfoResponse* response) override;
  grpc::ServerUnaryReactor* GetStatistics(grpc::CallbackServerContext* context,
                                          const v1::GetStatisticsRequest* request,
                                          v1::GetStatisticsResponse* response) override;

 private:
  const ServiceContext& services_;
};

}  // namespace spillway

#pragma once

#include "services/service.h"
#include "spillway/v1/admin_service.pb.h"

namespace spillway {

class AdminService final : public Service {
 public:
  explicit AdminService(const ServiceContext& services);

 private:
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const Caller& caller,
                                          const v1::GetServerInfoRequest* request,
                                          v1::GetServerInfoResponse* response);
  grpc::ServerUnaryReactor* GetStatistics(grpc::CallbackServerContext* context,
                                          const Caller& caller,
                                          const v1::GetStatisticsRequest* request,
                                          v1::GetStatisticsResponse* response);
};

}  // namespace spillway

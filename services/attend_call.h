#pragma once

#include "services/call.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

// The unary calls Attend and Select. Request and response live until the reactor is done, so the
// engine reads the request's bytes in place.
grpc::ServerUnaryReactor* StartAttend(const ServiceContext& services,
                                      grpc::CallbackServerContext& context, const Caller& caller,
                                      const v1::AttendRequest& request,
                                      v1::AttendResponse* response);
grpc::ServerUnaryReactor* StartSelect(const ServiceContext& services,
                                      grpc::CallbackServerContext& context, const Caller& caller,
                                      const v1::SelectRequest& request,
                                      v1::SelectResponse* response);

// Converts one item of a request: finds its sequence and checks its query. path: of the item in the
// request, for errors.
absl::StatusOr<AttendItem> ItemFromProto(const ServiceContext& services, const Caller& caller,
                                         const v1::AttendItem& item, const std::string& path);

}  // namespace spillway

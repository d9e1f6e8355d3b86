#pragma once

#include <memory>
#include <vector>

#include "daemon/metrics/call_counters.h"
#include "grpcpp/support/server_interceptor.h"

namespace spillway {

// For ServerBuilder::experimental(): counts every call with its status and its time, but for
// streams in both directions, whose every message would pay for it: they count themselves. The
// counters outlive the server.
std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>>
CallInterceptors(const CallCounters& counters);

}  // namespace spillway

#pragma once

#include <memory>
#include <vector>

#include "grpcpp/support/server_interceptor.h"
#include "services/metrics/call_counters.h"

namespace spillway {

// For ServerBuilder::experimental(): counts calls with their status and duration. Bidirectional
// streams are not intercepted, because each of their messages would cost time; they count
// themselves. The counters must outlive the server.
std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>>
CallInterceptors(const CallCounters& counters);

}  // namespace spillway

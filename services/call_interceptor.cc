#include "services/call_interceptor.h"

namespace spillway {
namespace {

using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::ServerRpcInfo;

class CallInterceptor final : public grpc::experimental::Interceptor {
 public:
  explicit CallInterceptor(MethodCounters* counters) : timer_(counters) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      timer_.End(static_cast<int>(methods->GetSendStatus().error_code()));
    }
    methods->Proceed();
  }

 private:
  const CallTimer timer_;
};

class Factory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit Factory(const CallCounters& counters) : counters_(counters) {}

  // Null: the call has no interceptor.
  grpc::experimental::Interceptor* CreateServerInterceptor(ServerRpcInfo* info) override {
    MethodCounters* const counters = counters_.Find(info->method());
    if (counters == nullptr || counters->counts_itself) return nullptr;
    return new CallInterceptor(counters);
  }

 private:
  const CallCounters& counters_;
};

}  // namespace

std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>>
CallInterceptors(const CallCounters& counters) {
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> factories;
  factories.push_back(std::make_unique<Factory>(counters));
  return factories;
}

}  // namespace spillway

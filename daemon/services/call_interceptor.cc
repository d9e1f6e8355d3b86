#include "daemon/services/call_interceptor.h"

namespace spillway {
namespace {

using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::ServerRpcInfo;

class CallInterceptor final : public grpc::experimental::Interceptor {
 public:
  CallInterceptor(MethodCounters* counters, bool is_unary)
      : timer_(counters), unary_(is_unary ? counters : nullptr) {
    if (unary_ != nullptr) ++unary_->open_count;
  }
  // Runs when the call has ended and its answer has been sent.
  ~CallInterceptor() override {
    if (unary_ != nullptr) --unary_->open_count;
  }

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      timer_.End(static_cast<int>(methods->GetSendStatus().error_code()));
    }
    methods->Proceed();
  }

 private:
  const CallTimer timer_;
  MethodCounters* const unary_;  // null: a stream, which StreamSet counts
};

class Factory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit Factory(const CallCounters& counters) : counters_(counters) {}

  // Null: the call has no interceptor.
  grpc::experimental::Interceptor* CreateServerInterceptor(ServerRpcInfo* info) override {
    if (info->type() == ServerRpcInfo::Type::BIDI_STREAMING) return nullptr;
    MethodCounters* const counters = counters_.Find(info->method());
    if (counters == nullptr) return nullptr;
    return new CallInterceptor(counters, info->type() == ServerRpcInfo::Type::UNARY);
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

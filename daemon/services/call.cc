#include "daemon/services/call.h"

#include <chrono>
#include <iterator>

namespace spillway {
namespace {

CancelToken::Clock::time_point DeadlineOf(const grpc::CallbackServerContext& context) {
  using System = std::chrono::system_clock;
  // Beyond a year the clocks' arithmetic would be all that matters.
  constexpr auto kFar = std::chrono::hours(24 * 365);
  const System::time_point deadline = context.deadline();
  const System::time_point now = System::now();
  if (deadline > now + kFar) return CancelToken::Clock::time_point::max();
  return CancelToken::Clock::now() +
         std::chrono::duration_cast<CancelToken::Clock::duration>(deadline - now);
}

// Asks the call itself, while it lives.
class CallCancelToken final : public CancelToken {
 public:
  explicit CallCancelToken(const grpc::CallbackServerContext& context)
      : CancelToken(DeadlineOf(context)), context_(context) {}
  bool cancelled() const override { return context_.IsCancelled(); }

 private:
  const grpc::CallbackServerContext& context_;
};

}  // namespace

absl::StatusOr<Caller> CallerOf(const ServiceContext& services,
                                const grpc::CallbackServerContext& context) {
  if (services.tokens == nullptr) return Caller();
  const auto& metadata = context.client_metadata();
  // Of two it would not be known who is meant.
  const auto [first, last] = metadata.equal_range("authorization");
  if (first == last || std::next(first) != last) return services.tokens->Authenticate("");
  return services.tokens->Authenticate({first->second.data(), first->second.size()});
}

std::shared_ptr<CancelToken> MakeCancelToken(const grpc::CallbackServerContext& context) {
  return std::make_shared<CancelToken>(DeadlineOf(context));
}

UnaryCall::UnaryCall(const ServiceContext& services, grpc::CallbackServerContext& context)
    : services_(services),
      reactor_(context.DefaultReactor()),
      cancel_(std::make_shared<CallCancelToken>(context)) {}

void UnaryCall::End(const grpc::Status& status) {
  grpc::ServerUnaryReactor* const reactor = reactor_;
  delete this;
  reactor->Finish(status);
}

}  // namespace spillway

#include "services/call.h"

#include <chrono>
#include <iterator>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/errors.h"
#include "host/base/status_macros.h"
#include "host/base/steady_time.h"
#include "services/convert/trace.h"

namespace spillway {
namespace {

SteadyTime DeadlineOf(const grpc::CallbackServerContext& context) {
  // A deadline more than a year away counts as no deadline.
  constexpr int64_t kFarSeconds = 365 * 24 * 3600;
  // Not deadline(), which is on the wall clock.
  const gpr_timespec left = gpr_convert_clock_type(context.raw_deadline(), GPR_TIMESPAN);
  if (left.tv_sec > kFarSeconds) return kNever;
  return SteadyNow() + std::chrono::seconds(left.tv_sec) + std::chrono::nanoseconds(left.tv_nsec);
}

// Reads the state of the call itself. Valid only as long as the call.
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
  const auto& metadata = context.client_metadata();
  Caller caller;
  if (services.tokens != nullptr) {
    // With two headers it would be unclear which one counts.
    const auto [first, last] = metadata.equal_range("authorization");
    const bool one = first != last && std::next(first) == last;
    ASSIGN_OR_RETURN(caller, services.tokens->Authenticate(
                                 one ? std::string_view(first->second.data(), first->second.size())
                                     : std::string_view()));
  }
  if (std::string trace = TraceOf(context); !trace.empty()) {
    caller = caller.InTrace(std::move(trace));
  }
  if (services.own_client != nullptr) return caller.With(services.own_client);
  const auto said = metadata.find(kClientMetadata);
  if (said == metadata.end()) return caller;
  ASSIGN_OR_RETURN(std::shared_ptr<Presence> client,
                   ClientOf(services, caller, {said->second.data(), said->second.size()},
                            absl::StrCat("metadata ", kClientMetadata)));
  return caller.With(std::move(client));
}

std::string TraceOf(const grpc::CallbackServerContext& context) {
  const auto& metadata = context.client_metadata();
  const auto only = [&](const char* key) {
    const auto [first, last] = metadata.equal_range(key);
    const bool one = first != last && std::next(first) == last;
    return one ? std::string_view(first->second.data(), first->second.size()) : std::string_view();
  };
  std::string trace = TraceIdOf(only(kTraceparentMetadata));
  return trace.empty() ? RequestIdOf(only(kRequestIdMetadata)) : trace;
}

absl::StatusOr<std::shared_ptr<Presence>> ClientOf(const ServiceContext& services,
                                                   const Caller& caller, std::string_view id,
                                                   const std::string& field) {
  if (!Registry::IsValidId(id)) {
    return InvalidField(field,
                        absl::StrCat("\"", absl::CHexEscape(std::string(id.substr(0, 100))),
                                     "\" does not match [a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?"));
  }
  return caller.is_tenant() ? services.engine.ClientOf(caller.IdOf(id))
                            : services.engine.ClientOf(id);
}

std::shared_ptr<CancelToken> MakeCancelToken(const grpc::CallbackServerContext& context) {
  return std::make_shared<CancelToken>(DeadlineOf(context));
}

UnaryCall::UnaryCall(const ServiceContext& services, grpc::CallbackServerContext& context)
    : services_(services),
      context_(context),
      reactor_(context.DefaultReactor()),
      cancel_(std::make_shared<CallCancelToken>(context)) {}

void UnaryCall::End(const grpc::Status& status) {
  grpc::ServerUnaryReactor* const reactor = reactor_;
  delete this;
  reactor->Finish(status);
}

}  // namespace spillway

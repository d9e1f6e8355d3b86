#include "daemon/services/call.h"

#include <chrono>

namespace spillway {

std::shared_ptr<CancelToken> MakeCancelToken(const grpc::CallbackServerContext& context) {
  using System = std::chrono::system_clock;
  // Beyond a year the clocks' arithmetic would be all that matters.
  constexpr auto kFar = std::chrono::hours(24 * 365);
  const System::time_point deadline = context.deadline();
  const System::time_point now = System::now();
  if (deadline > now + kFar) return std::make_shared<CancelToken>();
  return std::make_shared<CancelToken>(
      CancelToken::Clock::now() +
      std::chrono::duration_cast<CancelToken::Clock::duration>(deadline - now));
}

}  // namespace spillway

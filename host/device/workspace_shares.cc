#include "host/device/workspace_shares.h"

#include <algorithm>

#include "host/device/job_queue.h"

namespace spillway {
namespace {

constexpr int64_t kScarceBytes = int64_t{4} << 30;
constexpr int64_t kKinds = kJobKinds.size();

}  // namespace

WorkspaceShares WorkspaceShares::Of(int64_t memory_limit_bytes, bool has_copies,
                                    int64_t total_bytes) {
  const bool scarce = memory_limit_bytes < kScarceBytes;
  WorkspaceShares shares;
  shares.slots_of_kind = scarce ? 1 : 2;
  const int64_t slots = kKinds * shares.slots_of_kind;
  if (total_bytes > 0) {
    // A fifth for jobs, and the rest for two steps: while sequences come and go, one is opened
    // before the other ends. If their exact attends take more besides, one of them may find no
    // room.
    shares.wave_bytes = total_bytes / 5 / slots;
    shares.step_bytes = total_bytes / 5 * 2;
    shares.total_bytes = total_bytes;
    return shares;
  }
  if (scarce) {
    // A step has memory of its own, so that it has room for many sequences.
    shares.wave_bytes = memory_limit_bytes / 64;
    shares.step_bytes = memory_limit_bytes / 8;
    shares.total_bytes =
        slots * shares.wave_bytes + shares.step_bytes + (has_copies ? shares.step_bytes / 2 : 0);
    return shares;
  }
  // At least a step beside a long job.
  shares.wave_bytes = std::min(memory_limit_bytes / 24, int64_t{1} << 30);
  shares.step_bytes = std::max(2 * shares.wave_bytes, kScarceBytes / 8);
  shares.total_bytes = slots * shares.wave_bytes;
  return shares;
}

}  // namespace spillway

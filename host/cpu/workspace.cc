#include "host/cpu/workspace.h"

#include <algorithm>
#include <utility>

namespace spillway {

absl::StatusOr<WorkspacePool::Lease> WorkspacePool::Acquire(int64_t token_count, int head_count,
                                                            int64_t histogram_count,
                                                            int64_t level_count) {
  std::unique_ptr<SelectWorkspace> w;
  {
    const MutexLock lock(mutex_);
    if (!idle_.empty()) {
      w = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (w == nullptr) w = std::make_unique<SelectWorkspace>();
  const int64_t held_tokens = static_cast<int64_t>(w->bins.size());
  const int64_t held_heads = static_cast<int64_t>(w->head_bins.size());
  const int64_t held_head_tokens =
      held_heads > 0 ? static_cast<int64_t>(w->head_bins[0].size()) : 0;
  const int64_t held_bins = static_cast<int64_t>(w->histograms.size());
  const int64_t held_levels = static_cast<int64_t>(w->levels.size());
  if (token_count > held_tokens || head_count > held_heads ||
      (head_count > 0 && token_count > held_head_tokens) || histogram_count > held_bins ||
      level_count > held_levels) {
    // Buffers grow by half, so that a growing context does not reallocate at each step.
    const auto grown = [](int64_t want, int64_t held) {
      return want > held ? want + want / 2 : held;
    };
    const int64_t tokens = grown(token_count, held_tokens);
    const int64_t heads = std::max<int64_t>(head_count, held_heads);
    const int64_t bins = grown(histogram_count, held_bins);
    const int64_t levels = grown(level_count, held_levels);
    // The old buffers are freed first, so that old and new are never held at once.
    *w = SelectWorkspace();
    const auto reserve = [&] {
      return budget_->Reserve(tokens * 2 * (1 + heads) + bins * 4 + levels,
                              "the workspace of an attend", MemoryUse::kWorkspaces);
    };
    absl::StatusOr<MemoryReservation> reservation = reserve();
    if (!reservation.ok()) {
      {
        const MutexLock lock(mutex_);
        idle_.clear();
      }
      reservation = reserve();
    }
    if (!reservation.ok()) return reservation.status();
    w->reservation = *std::move(reservation);
    w->bins.resize(tokens);
    w->head_bins.resize(heads);
    for (auto& b : w->head_bins) b.resize(tokens);
    w->histograms.resize(bins);
    w->levels.resize(levels);
  }
  return Lease(this, std::move(w));
}

void WorkspacePool::Return(std::unique_ptr<SelectWorkspace> workspace) {
  const MutexLock lock(mutex_);
  idle_.push_back(std::move(workspace));
}

}  // namespace spillway

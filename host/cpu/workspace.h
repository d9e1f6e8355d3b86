#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/base/mutex.h"
#include "host/memory/memory_budget.h"

namespace spillway {

// Per-token buffers of one sparse attend of one KV head. They grow and never shrink; their bytes
// are charged to the budget.
struct SelectWorkspace {
  std::vector<uint16_t> bins;                    // group bins of the scored tokens
  std::vector<std::vector<uint16_t>> head_bins;  // per query head, for top-p
  std::vector<uint32_t> histograms;              // [block][set][bin], see ScorePass
  std::vector<uint8_t> levels;                   // [page][G][kPageTokenCount], with value codes

  MemoryReservation reservation;
};

// Keeps workspaces between attends. Thread-safe. Must outlive its leases.
class WorkspacePool {
 public:
  explicit WorkspacePool(MemoryBudget* budget) : budget_(budget) {}

  class Lease {
   public:
    Lease(WorkspacePool* pool, std::unique_ptr<SelectWorkspace> w)
        : pool_(pool), workspace_(std::move(w)) {}
    Lease(Lease&&) = default;
    ~Lease() {
      if (workspace_ != nullptr) pool_->Return(std::move(workspace_));
    }
    SelectWorkspace& operator*() { return *workspace_; }
    SelectWorkspace* operator->() { return workspace_.get(); }

   private:
    WorkspacePool* pool_;
    std::unique_ptr<SelectWorkspace> workspace_;
  };

  // A workspace for token_count scored tokens, with head_count head_bins (0: none),
  // histogram_count histogram bins in all, and level_count levels. RESOURCE_EXHAUSTED.
  absl::StatusOr<Lease> Acquire(int64_t token_count, int head_count, int64_t histogram_count,
                                int64_t level_count);

  // Charges memory that an attend takes besides its workspace. RESOURCE_EXHAUSTED.
  absl::StatusOr<MemoryReservation> Reserve(int64_t bytes) {
    return budget_->Reserve(bytes, "the sums of an attend", MemoryUse::kWorkspaces);
  }

 private:
  void Return(std::unique_ptr<SelectWorkspace> workspace);

  MemoryBudget* const budget_;
  Mutex mutex_;
  std::vector<std::unique_ptr<SelectWorkspace>> idle_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway

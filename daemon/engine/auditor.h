#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "daemon/engine/model.h"
#include "host/base/mutex.h"
#include "host/device/device.h"

namespace spillway {

struct AuditOptions {
  // Of the attends, the share that is checked, in [0, 1]; 0: none, and every
  // attend is as its policy says.
  double share = 0;
  // Of one core, what checks may take in the long run, in (0, 1].
  double cpu_share = 0.1;
};

// Checks a random share of the attends against exact attention, in a thread of
// its own, and raises the escalation level of the heads whose promises fail. Thread-safe.
class Auditor {
 public:
  explicit Auditor(const AuditOptions& options);
  ~Auditor() { Stop(); }

  bool enabled() const { return options_.share > 0; }
  double share() const { return options_.share; }

  // Gives an attend the escalation levels that its heads have come to. Returns the levels,
  // [H_kv], empty if all are 0: Offer() wants them. The attend's policy becomes
  // dense (`all`) if a head's is.
  std::vector<int> Strengthen(const Model& model, int layer, AttendQuery& attend) const;

  // Takes note of an attend that was served; `policy` is as it came. May keep
  // its query, its answer and a share of its rows until they are checked. In
  // the sequence's turn.
  void Offer(const std::shared_ptr<Model>& model, int layer, const Policy& policy,
             const std::vector<int>& levels, const JobItem& item);

  // Ends the check that runs and forgets those that wait; later offers come to
  // nothing. Before the models' memory goes.
  void Stop();

  // Checks that were chosen but had no room.
  int64_t dropped_count() const { return dropped_count_.load(std::memory_order_relaxed); }

 private:
  // One query of an attend.
  struct Check {
    std::shared_ptr<Model> model;
    int layer = 0;
    Policy policy;
    std::vector<int> levels;
    LayerRows rows;
    std::vector<std::byte> q;  // [H_q, d]
    DType q_dtype = DType::kF32;
    int64_t visible = 0;
    std::vector<float> out;                 // [H_q, d]
    std::vector<Certificate> certificates;  // [H_q]
  };

  bool Chosen();
  void Run();
  void Perform(const Check& check) const;

  const AuditOptions options_;
  const std::shared_ptr<CancelToken> cancel_ = std::make_shared<CancelToken>();
  std::atomic<uint64_t> offered_count_{0};
  std::atomic<int64_t> dropped_count_{0};
  Mutex mutex_;
  CondVar wake_;
  std::deque<Check> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace spillway

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "engine/model.h"
#include "host/base/mutex.h"
#include "host/device/device.h"

namespace spillway {

struct AuditOptions {
  // Share of the attends that is checked, in [0, 1]. 0: none; then attends follow their policy
  // unchanged.
  double share = 0;
  // Share of one core that the checks may use in the long run, in (0, 1].
  double cpu_share = 0.1;
};

// Checks a random share of the attends against exact attention, in its own thread. If too many
// outputs of a head break their promise, the head's escalation level is raised. Thread-safe.
class Auditor {
 public:
  explicit Auditor(const AuditOptions& options);
  ~Auditor() { Stop(); }

  bool enabled() const { return options_.share > 0; }
  double share() const { return options_.share; }

  // Applies the escalation levels of the layer's heads to an attend. Returns the levels, [H_kv],
  // for Offer(); empty if all are 0. If the level of a head is dense, the attend's selector becomes
  // kAll.
  std::vector<int> Strengthen(const Model& model, int layer, AttendQuery& attend) const;

  // Called for each attend that was served; `policy` is the policy before Strengthen(). Queries
  // that are chosen for a check are queued, with their output and a share of the rows. Must be
  // called in the sequence's turn.
  void Offer(const std::shared_ptr<Model>& model, int layer, const Policy& policy,
             const std::vector<int>& levels, const JobItem& item);

  // Cancels the running check and drops the waiting ones. Later offers are dropped too. Must be
  // called before the models' memory is freed.
  void Stop();

  // Checks that were chosen but dropped, because the queue was full.
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

#include "engine/auditor.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "host/core/keyed_hash.h"
#include "host/device/exact_attend.h"
#include "host/policy/escalation.h"

namespace spillway {
namespace {

// Waiting checks, at most. Each shares the rows of a layer, so an append to that layer must first
// copy a page.
constexpr size_t kWaitingMax = 16;

// Whether the relative error of `out` against `exact`, [d] each, exceeds epsilon.
bool IsViolation(const float* out, const float* exact, int d, double epsilon) {
  double error = 0, norm = 0;
  for (int i = 0; i < d; ++i) {
    const double difference = static_cast<double>(out[i]) - exact[i];
    error += difference * difference;
    norm += static_cast<double>(exact[i]) * exact[i];
  }
  return !(error <= epsilon * epsilon * norm);
}

}  // namespace

Auditor::Auditor(const AuditOptions& options) : options_(options) {
  if (enabled()) thread_ = std::thread([this] { Run(); });
}

std::vector<int> Auditor::Strengthen(const Model& model, int layer, AttendQuery& attend) const {
  if (!enabled()) return {};
  std::vector<int> levels = model.audits.Levels(layer);
  if (levels.empty()) return {};
  std::vector<TailPolicy> tails;
  for (const int level : levels) {
    const Escalation escalation = EscalationAt(attend.policy, level);
    if (escalation.dense) {
      attend.policy.selector = Selector::kAll;
      return levels;
    }
    tails.push_back(escalation.tail);
  }
  attend.tails = std::move(tails);
  return levels;
}

bool Auditor::Chosen() {
  const uint64_t index = offered_count_.fetch_add(1, std::memory_order_relaxed);
  return static_cast<double>(SplitMix64(index) >> 11) * 0x1p-53 < options_.share;
}

void Auditor::Offer(const std::shared_ptr<Model>& model, int layer, const Policy& policy,
                    const std::vector<int>& levels, const JobItem& item) {
  const AttendQuery& attend = *item.attend;
  const AttendResult& result = item.result;
  if (!enabled() || attend.select_only) return;
  const ModelSpec& spec = model->spec;
  const int64_t heads = spec.query_head_count;
  const int64_t width = heads * spec.head_dim;
  for (int64_t t = 0; t < attend.query_count; ++t) {
    if (!Chosen()) continue;
    const auto first = result.certificates.begin() + t * heads;
    if (std::none_of(first, first + heads, [](const Certificate& certificate) {
          return certificate.promise == Promise::kStatistical;
        })) {
      // Heads whose level is dense keep their promise: they count as checked without violations.
      for (int h = 0; h < static_cast<int>(levels.size()); ++h) {
        if (!EscalationAt(policy, levels[h]).dense) continue;
        model->audits.Record(layer, h, levels[h], DenseLevel(policy), policy.delta,
                             spec.query_heads_per_kv_head(), 0);
      }
      continue;
    }
    const int64_t q_bytes = width * DTypeBytes(attend.q_dtype);
    Check check{.model = model,
                .layer = layer,
                .policy = policy,
                .levels = levels,
                .rows = attend.rows->Share(attend.visible[t]),
                .q = {attend.q + t * q_bytes, attend.q + (t + 1) * q_bytes},
                .q_dtype = attend.q_dtype,
                .visible = attend.visible[t],
                .out = {result.out.begin() + t * width, result.out.begin() + (t + 1) * width},
                .certificates = {first, first + heads}};
    {
      const MutexLock lock(mutex_);
      if (stopped_ || queue_.size() == kWaitingMax) {
        dropped_count_.fetch_add(1, std::memory_order_relaxed);
        continue;
      }
      queue_.push_back(std::move(check));
    }
    wake_.NotifyOne();
  }
}

void Auditor::Perform(const Check& check) const {
  const ModelSpec& spec = check.model->spec;
  AttendQuery attend;
  attend.rows = &check.rows;
  attend.q_dtype = check.q_dtype;
  attend.q = check.q.data();
  attend.visible = {check.visible};
  const auto exact = ExactAttend(spec, check.layer, std::move(attend), cancel_.get());
  // Cancelled, or a row that the attend did not read gives a logit that is not finite.
  if (!exact.ok()) return;
  const int d = spec.head_dim;
  const int level_max = DenseLevel(check.policy);
  for (int h = 0; h < spec.kv_head_count; ++h) {
    int64_t checks = 0, violations = 0;
    const int heads = spec.query_heads_per_kv_head();
    for (int g = h * heads; g < (h + 1) * heads; ++g) {
      if (check.certificates[g].promise != Promise::kStatistical) continue;
      ++checks;
      violations += IsViolation(check.out.data() + int64_t{g} * d, exact->data() + int64_t{g} * d,
                                d, check.policy.epsilon);
    }
    if (checks == 0) continue;
    check.model->audits.Record(check.layer, h, check.levels.empty() ? 0 : check.levels[h],
                               level_max, check.policy.delta, checks, violations);
  }
}

void Auditor::Run() {
  using Clock = std::chrono::steady_clock;
  MutexLock lock(mutex_);
  for (;;) {
    while (!stopped_ && queue_.empty()) wake_.Wait(mutex_);
    if (stopped_) return;
    const Clock::time_point begin = Clock::now();
    {
      const Check check = std::move(queue_.front());
      queue_.pop_front();
      lock.Unlock();
      Perform(check);
    }
    const Clock::time_point end = Clock::now();
    const auto rest =
        std::chrono::duration_cast<Clock::duration>((end - begin) * (1 / options_.cpu_share - 1));
    lock.Lock();
    while (!stopped_ && wake_.WaitUntil(mutex_, end + rest)) {
    }
  }
}

void Auditor::Stop() {
  {
    const MutexLock lock(mutex_);
    stopped_ = true;
  }
  cancel_->Cancel();
  wake_.NotifyOne();
  if (thread_.joinable()) thread_.join();
  const MutexLock lock(mutex_);
  queue_.clear();
}

}  // namespace spillway

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "host/base/mutex.h"

namespace spillway {

// Limits on what a namespace has. 0: no limit.
struct Quota {
  // Rows, index, models, regions, and the files of snapshots.
  int64_t bytes_max = 0;
  int64_t sequence_count_max = 0;  // in the registry
  friend bool operator==(const Quota&, const Quota&) = default;
};

// What a namespace uses. Thread-safe.
class Account {
 public:
  explicit Account(std::string name_space, int64_t number = 0)
      : number(number), name_space_(std::move(name_space)) {}

  // Job::owner of its jobs.
  const int64_t number;

  Quota quota() const { return {bytes_max_, sequence_count_max_}; }
  // Applies to later charges only.
  void SetQuota(const Quota& quota) {
    bytes_max_ = quota.bytes_max;
    sequence_count_max_ = quota.sequence_count_max;
  }
  int64_t used_bytes() const { return used_bytes_; }
  int64_t sequence_count() const { return sequence_count_; }

  // bytes may be negative. RESOURCE_EXHAUSTED, reason QUOTA_EXHAUSTED, names the quota; then
  // nothing is charged.
  absl::Status Charge(int64_t bytes);
  // Charges without a check of the quota: bytes that are held already, or, if negative, bytes that
  // were freed.
  void Settle(int64_t bytes) { used_bytes_ += bytes; }
  // Errors as Charge.
  absl::Status AddSequence();
  void RemoveSequence() { --sequence_count_; }

 private:
  const std::string name_space_;
  std::atomic<int64_t> bytes_max_{0};
  std::atomic<int64_t> sequence_count_max_{0};
  std::atomic<int64_t> used_bytes_{0};
  std::atomic<int64_t> sequence_count_{0};
};

// The accounts of all namespaces. Each is created at its first use. Thread-safe.
class AccountTable {
 public:
  std::shared_ptr<Account> Of(std::string_view name_space) {
    const MutexLock lock(mutex_);
    const auto found = accounts_.find(name_space);
    if (found != accounts_.end()) return found->second;
    auto account =
        std::make_shared<Account>(std::string(name_space), static_cast<int64_t>(accounts_.size()));
    accounts_.emplace(name_space, account);
    return account;
  }

 private:
  Mutex mutex_;
  std::map<std::string, std::shared_ptr<Account>, std::less<>> accounts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway

#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/engine/engine_counters.h"

namespace spillway {

// Calls of one method. Thread-safe, each counter by itself.
struct MethodCounters {
  MethodCounters(std::string method, bool is_work) : method(std::move(method)), is_work(is_work) {}

  // code: as gRPC answers, and absl names it.
  void Note(int code, double seconds) {
    const auto at = static_cast<size_t>(code);
    counts[at < counts.size() ? at : static_cast<size_t>(absl::StatusCode::kUnknown)].fetch_add(
        1, std::memory_order_relaxed);
    this->seconds.Note(seconds);
  }

  const std::string method;  // "AttentionService/Attend"
  // Whether a daemon that is about to end refuses it, and waits for those that run.
  const bool is_work;
  std::atomic<int64_t> open_count{0};             // unary calls that have not ended
  std::array<std::atomic<int64_t>, 17> counts{};  // by code, absl::StatusCode
  SecondsDistribution seconds;                    // to the answer; of a stream to its end
};

// Counts one call, from its making on.
class CallTimer {
 public:
  // counters: null where nobody counts.
  explicit CallTimer(MethodCounters* counters) : counters_(counters) {}
  // Once.
  void End(int code) const {
    if (counters_ == nullptr) return;
    counters_->Note(code, std::chrono::duration<double>(Clock::now() - begin_).count());
  }

 private:
  using Clock = std::chrono::steady_clock;
  MethodCounters* const counters_;
  const Clock::time_point begin_ = Clock::now();
};

// Calls by method. The methods are known at the start: a client that makes names up adds none.
class CallCounters {
 public:
  // name: gRPC's, "/spillway.v1.AttentionService/Attend". REQUIRES: before calls come.
  void Add(const std::string& name, bool is_work = true) {
    methods_.push_back(std::make_unique<MethodCounters>(name.substr(name.rfind('.') + 1), is_work));
    by_name_[name] = methods_.back().get();
  }

  // Null for what was not added. Thread-safe.
  MethodCounters* Find(std::string_view name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : found->second;
  }
  // Unary calls of work that have not ended.
  int64_t open_work_count() const {
    int64_t sum = 0;
    for (const auto& method : methods_) {
      if (method->is_work) sum += method->open_count;
    }
    return sum;
  }
  const std::vector<std::unique_ptr<MethodCounters>>& methods() const { return methods_; }

 private:
  std::vector<std::unique_ptr<MethodCounters>> methods_;
  std::map<std::string, MethodCounters*, std::less<>> by_name_;
};

}  // namespace spillway

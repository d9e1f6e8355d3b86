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
#include "engine/engine_counters.h"

namespace spillway {

// Counters of one method's calls. Thread-safe, but each counter separately.
struct MethodCounters {
  MethodCounters(std::string method, bool is_work, bool counts_itself)
      : method(std::move(method)), is_work(is_work), counts_itself(counts_itself) {}

  // code: gRPC's status code, which equals that of absl.
  void Note(int code, double seconds) {
    const auto at = static_cast<size_t>(code);
    counts[at < counts.size() ? at : static_cast<size_t>(absl::StatusCode::kUnknown)].fetch_add(
        1, std::memory_order_relaxed);
    this->seconds.Note(seconds);
  }

  const std::string method;  // "AttentionService/Attend"
  // A draining daemon refuses new calls of work, and waits for running ones.
  const bool is_work;
  const bool counts_itself;            // its handler counts its calls, and not an interceptor
  std::atomic<int64_t> open_count{0};  // running unary calls
  std::array<std::atomic<int64_t>, 17> counts{};  // by absl::StatusCode
  SecondsDistribution seconds;                    // until the answer; of a stream until its end
};

// Counts one call. Its duration begins with the constructor.
class CallTimer {
 public:
  // counters: null if the call is not counted.
  explicit CallTimer(MethodCounters* counters) : counters_(counters) {}
  // Call it only once.
  void End(int code) const {
    if (counters_ == nullptr) return;
    counters_->Note(code, std::chrono::duration<double>(Clock::now() - begin_).count());
  }

 private:
  using Clock = std::chrono::steady_clock;
  MethodCounters* const counters_;
  const Clock::time_point begin_ = Clock::now();
};

// Counters by method. All methods are known at the start, so a client that invents names adds none.
class CallCounters {
 public:
  // name: in gRPC's form, such as "/spillway.v1.AttentionService/Attend". REQUIRES: called before
  // the first call.
  MethodCounters& Add(const std::string& name, bool is_work = true, bool counts_itself = false) {
    methods_.push_back(
        std::make_unique<MethodCounters>(name.substr(name.rfind('.') + 1), is_work, counts_itself));
    return *(by_name_[name] = methods_.back().get());
  }

  // Null for a method that was not added. Thread-safe.
  MethodCounters* Find(std::string_view name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : found->second;
  }
  // Running unary calls of work.
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

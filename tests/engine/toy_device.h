#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "host/device/device.h"
#include "host/device/queue_waits.h"
#include "host/device/stream_step.h"

namespace spillway {

// A device that keeps no codes and answers late: every job waits until the test releases it or,
// with `delayed`, for a random time in its own thread. The answer of an attend says what it saw:
// out[0] = the visible count, out[1] = the first element of the queries, lse[0] = the first element
// of the last visible row's key, head 0 (f32 models and queries).
class ToyDevice : public Device {
 public:
  explicit ToyDevice(bool delayed) : delayed_(delayed) {}
  ~ToyDevice() override { Join(); }

  // ---- for tests

  size_t waiting_count() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return waiting_.size();
  }
  // The layer of the i-th waiting job.
  int waiting_layer(size_t i = 0) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return waiting_.at(i).job->layer;
  }
  // Serves the i-th waiting job in another thread, and returns after its completion was called.
  void Release(size_t i = 0) {
    Pending pending;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      pending = std::move(waiting_.at(i));
      waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    std::thread([&] { Serve(std::move(pending)); }).join();
  }
  void ReleaseAll() {
    while (waiting_count() > 0) Release();
  }
  // Ends all jobs that wait and all later ones with an error. They touch no memory, because a test
  // that has failed may have freed what they name.
  void RefuseAll() {
    refuses_ = true;
    ReleaseAll();
  }
  // Waits for the threads of delayed jobs, and for those that they start.
  void Join() {
    for (;;) {
      std::vector<std::thread> threads;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        threads.swap(threads_);
      }
      if (threads.empty()) return;
      for (std::thread& thread : threads) thread.join();
    }
  }
  // The largest number of jobs that were submitted and not yet answered.
  int running_count_max() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return running_max_;
  }
  // The next attend of any job fails with this, after its append.
  void FailAttend(absl::Status status) { attend_error_ = std::move(status); }
  // The result of CheckUsable from now on.
  void SetUsable(absl::Status status) { usable_ = std::move(status); }
  absl::Status CheckUsable() const override { return usable_; }
  // The next append of any job fails with this, before it writes.
  void FailAppend(absl::Status status) { append_error_ = std::move(status); }
  // PrepareAppend fails with this once, after `earlier_count` calls that succeed.
  void FailPrepare(absl::Status status, int earlier_count = 0) {
    prepare_error_ = std::move(status);
    prepared_until_error_ = earlier_count;
  }
  // The tokens of the longest layer, with those for which PrepareAppend has made room.
  static int64_t RoomOf(const DeviceSequence& sequence) {
    return static_cast<const ToySequence&>(sequence).room;
  }
  // Stage times and queue time that jobs report.
  std::vector<StageTime> stages;
  double queue_time_us = 0;
  // Job::device_time_us and Job::batch_item_count that jobs report.
  double device_time_us = 0;
  int64_t batch_item_count = 0;
  // Rows that each attend of an item reports as moved.
  int64_t moved_row_count = 0;
  // Makes the steps on streams; null: the device has no streams.
  std::function<std::unique_ptr<StreamStep>(StreamStepOptions)> make_stream_step;
  // The device reports memory of its own for codes.
  void SetMemory(DeviceMemory memory, int64_t index_bytes_per_token) {
    memory_ = memory;
    index_bytes_per_token_ = index_bytes_per_token;
  }

  // ---- Device

  const DeviceInfo& info() const override { return info_; }
  const QueueWaits* queue_waits() const override { return &queue_waits_; }
  absl::Status RegisterMemory(std::span<std::byte>) override { return absl::OkStatus(); }
  void UnregisterMemory(std::span<std::byte>) override {}
  absl::StatusOr<std::unique_ptr<DeviceModel>> CreateModel(const ModelSpec& spec,
                                                           std::span<const std::byte>,
                                                           const CancelToken*) override {
    return std::make_unique<ToyModel>(spec);
  }
  absl::StatusOr<std::unique_ptr<DeviceSequence>> CreateSequence(DeviceModel&) override {
    return std::make_unique<ToySequence>();
  }
  absl::StatusOr<std::unique_ptr<DeviceSequence>> ForkSequence(DeviceModel&, DeviceSequence&,
                                                               int64_t) override {
    return std::make_unique<ToySequence>();
  }
  void TruncateSequence(DeviceModel&, DeviceSequence& sequence, int64_t token_count) override {
    auto& room = static_cast<ToySequence&>(sequence).room;
    room = std::min<int64_t>(room, token_count);
  }
  absl::Status PrepareAppend(DeviceModel&, DeviceSequence& sequence, int, int64_t start,
                             int64_t count) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!prepare_error_.ok() && prepared_until_error_-- == 0) {
      return std::exchange(prepare_error_, absl::OkStatus());
    }
    auto& room = static_cast<ToySequence&>(sequence).room;
    room = std::max<int64_t>(room, start + count);
    return absl::OkStatus();
  }
  std::optional<DeviceMemory> memory() const override { return memory_; }
  int64_t WeightBytes(const ModelSpec&) const override { return 0; }
  int64_t IndexBytesPerToken(const ModelSpec&) const override { return index_bytes_per_token_; }
  absl::StatusOr<std::unique_ptr<StreamStep>> CreateStreamStep(DeviceModel& model,
                                                               StreamStepOptions options) override {
    if (make_stream_step == nullptr) return Device::CreateStreamStep(model, std::move(options));
    return make_stream_step(std::move(options));
  }
  void Fetch(const FetchWork& work, FetchDone done) override { done(FetchRows(work)); }
  void Submit(std::unique_ptr<Job> job, Completion done) override {
    std::unique_lock<std::mutex> lock(mutex_);
    running_max_ = std::max(running_max_, ++running_);
    Pending pending{std::move(job), std::move(done)};
    if (refuses_) {
      lock.unlock();
      return Serve(std::move(pending));
    }
    if (!delayed_) {
      waiting_.push_back(std::move(pending));
      return;
    }
    const std::chrono::microseconds delay(random_() % 2000);
    threads_.emplace_back([this, delay, pending = std::move(pending)]() mutable {
      std::this_thread::sleep_for(delay);
      Serve(std::move(pending));
    });
  }

 private:
  class ToyModel final : public DeviceModel {
   public:
    explicit ToyModel(const ModelSpec& spec) : spec_(spec) {}
    const ModelSpec& spec() const override { return spec_; }
    int64_t bytes() const override { return 0; }

   private:
    const ModelSpec spec_;
  };
  class ToySequence final : public DeviceSequence {
   public:
    int64_t index_bytes() const override { return 0; }
    // Number of jobs that are running for this sequence. The engine must never run two at once.
    std::atomic<int> user_count{0};
    std::atomic<int64_t> room{0};
  };
  struct Pending {
    std::unique_ptr<Job> job;
    Completion done;
  };

  void Serve(Pending pending) {
    for (JobItem& item : pending.job->items) ServeItem(*pending.job, item);
    pending.job->stages = stages;
    pending.job->queue_time_us = queue_time_us;
    pending.job->device_time_us = device_time_us;
    pending.job->batch_item_count = batch_item_count;
    queue_waits_.Note(*pending.job);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      --running_;
    }
    pending.done(std::move(pending.job));
  }

  void ServeItem(const Job& job, JobItem& item) {
    auto& sequence = static_cast<ToySequence&>(*item.sequence);
    if (++sequence.user_count != 1) item.status = absl::InternalError("two jobs at once");
    if (refuses_) item.status = absl::CancelledError("the test is over");
    if (item.append && item.status.ok()) {
      const std::lock_guard<std::mutex> lock(mutex_);
      item.status = std::exchange(append_error_, absl::OkStatus());
    }
    if (item.append && item.status.ok()) {
      AppendWork& work = *item.append;
      for (int h = 0; h < work.rows->kv_head_count() && !work.rows_present; ++h) {
        work.rows->WriteRows(h, work.start, 0, work.count, work.k, work.v);
      }
      work.rows->Commit(work.start + work.count);
    }
    if (item.attend && item.status.ok() && job.cancel != nullptr) item.status = job.cancel->Check();
    if (item.attend && item.status.ok()) {
      const std::lock_guard<std::mutex> lock(mutex_);
      item.status = std::exchange(attend_error_, absl::OkStatus());
    }
    if (item.attend && item.status.ok()) {
      Attend(job.model->spec(), *item.attend, item.result);
      item.result.moved_row_count = moved_row_count;
    }
    --sequence.user_count;
  }

  static void Attend(const ModelSpec& spec, const AttendQuery& attend, AttendResult& result) {
    const int64_t heads = attend.query_count * spec.query_head_count;
    result.out.assign(heads * spec.head_dim, 0);
    result.lse.assign(heads, 0);
    result.certificates.assign(heads, {});
    result.touched_row_counts.assign(attend.query_count * spec.kv_head_count,
                                     attend.visible.back());
    result.out[0] = static_cast<float>(attend.visible.back());
    if (attend.q_dtype == DType::kF32) std::memcpy(&result.out[1], attend.q, sizeof(float));
    std::memcpy(result.lse.data(), attend.rows->Row(0, attend.visible.back() - 1), sizeof(float));
  }

  const bool delayed_;
  absl::Status usable_;
  QueueWaits queue_waits_;
  DeviceInfo info_{"toy:0", "answers late", "", 1, "none"};
  std::optional<DeviceMemory> memory_;
  int64_t index_bytes_per_token_ = 0;
  std::mutex mutex_;
  std::minstd_rand random_{7};
  std::deque<Pending> waiting_;
  std::vector<std::thread> threads_;
  int running_ = 0;
  int running_max_ = 0;
  absl::Status attend_error_;
  absl::Status append_error_;
  absl::Status prepare_error_;
  int prepared_until_error_ = 0;
  std::atomic<bool> refuses_ = false;
};

}  // namespace spillway

#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "host/device/device.h"

namespace spillway {

class FakeModel final : public DeviceModel {
 public:
  FakeModel(Device* device, const ModelSpec& spec, std::atomic<int>* live_count)
      : device(device), spec_(spec), live_count_(live_count) {
    ++*live_count_;
  }
  ~FakeModel() override { --*live_count_; }
  const ModelSpec& spec() const override { return spec_; }
  int64_t bytes() const override { return 100; }

  Device* const device;

 private:
  const ModelSpec spec_;
  std::atomic<int>* const live_count_;
};

class FakeSequence final : public DeviceSequence {
 public:
  explicit FakeSequence(Device* device) : device(device) {}
  int64_t index_bytes() const override { return 7; }

  Device* const device;
};

// A device that records its calls and behaves as the test sets it. It serves an item by writing the
// last digit of the device's name to out[0] and the query count to lse[0]. If the query count is
// odd, the item's status is an error that names the count.
class FakeDevice final : public Device {
 public:
  explicit FakeDevice(const std::string& name)
      : info_{name, "fake " + name, "GPU-" + name, 2, ""} {}
  ~FakeDevice() override { Join(); }

  // ---- what the test sets

  std::optional<DeviceMemory> own_memory;
  absl::Status model_status;
  absl::Status sequence_status;
  absl::Status prepare_status;
  // How jobs are served: within Submit, each in its own thread, or when Release() is called.
  enum class Mode { kInline, kThread, kHold } mode = Mode::kInline;
  double job_time_us = 1;
  int64_t batch_item_count = 0;

  void Release() {
    Pending pending;
    {
      const std::lock_guard lock(mutex_);
      pending = std::move(held_.front());
      held_.pop_front();
    }
    std::thread([&] { Serve(std::move(pending)); }).join();
  }

  // Waits for the threads of mode kThread.
  void Join() {
    for (std::thread& thread : std::exchange(threads_, {})) thread.join();
  }

  // ---- what it saw

  std::vector<std::span<std::byte>> registered;
  std::vector<std::span<std::byte>> unregistered;
  std::atomic<int> model_count = 0;
  int sequence_attempts = 0;
  int fork_count = 0;
  std::vector<int64_t> truncations;
  std::vector<int> prepared_layers;
  std::vector<const JobItem*> job_items;  // per job: the address of its items
  std::vector<int> job_layers;
  std::vector<std::shared_ptr<CancelToken>> job_cancels;

  // ---- Device

  const DeviceInfo& info() const override { return info_; }
  absl::Status RegisterMemory(std::span<std::byte> extent) override {
    registered.push_back(extent);
    return absl::OkStatus();
  }
  void UnregisterMemory(std::span<std::byte> extent) override { unregistered.push_back(extent); }
  absl::StatusOr<std::unique_ptr<DeviceModel>> CreateModel(const ModelSpec& spec,
                                                           std::span<const std::byte>,
                                                           const CancelToken*) override {
    if (!model_status.ok()) return model_status;
    return std::make_unique<FakeModel>(this, spec, &model_count);
  }
  absl::StatusOr<std::unique_ptr<DeviceSequence>> CreateSequence(DeviceModel& model) override {
    const std::lock_guard lock(mutex_);
    ++sequence_attempts;
    CheckMine(model);
    if (!sequence_status.ok()) return sequence_status;
    return std::make_unique<FakeSequence>(this);
  }
  absl::StatusOr<std::unique_ptr<DeviceSequence>> ForkSequence(DeviceModel& model,
                                                               DeviceSequence& source,
                                                               int64_t) override {
    CheckMine(model, source);
    ++fork_count;
    if (!sequence_status.ok()) return sequence_status;
    return std::make_unique<FakeSequence>(this);
  }
  void TruncateSequence(DeviceModel& model, DeviceSequence& sequence,
                        int64_t token_count) override {
    CheckMine(model, sequence);
    truncations.push_back(token_count);
  }
  absl::Status PrepareAppend(DeviceModel& model, DeviceSequence& sequence, int layer, int64_t,
                             int64_t) override {
    CheckMine(model, sequence);
    prepared_layers.push_back(layer);
    return prepare_status;
  }
  std::optional<DeviceMemory> memory() const override { return own_memory; }
  int64_t WeightBytes(const ModelSpec&) const override { return 21; }
  int64_t IndexBytesPerToken(const ModelSpec&) const override { return 34; }

  // Answers with an error that names the device.
  void Fetch(const FetchWork&, FetchDone done) override { done(absl::UnknownError(info_.name)); }
  void Submit(std::unique_ptr<Job> job, Completion done) override {
    Pending pending{std::move(job), std::move(done)};
    {
      const std::lock_guard lock(mutex_);
      job_items.push_back(pending.job->items.data());
      job_layers.push_back(pending.job->layer);
      job_cancels.push_back(pending.job->cancel);
      if (mode == Mode::kHold) {
        held_.push_back(std::move(pending));
        return;
      }
      if (mode == Mode::kThread) {
        threads_.emplace_back(
            [this, pending = std::move(pending)]() mutable { Serve(std::move(pending)); });
        return;
      }
    }
    Serve(std::move(pending));
  }

 private:
  struct Pending {
    std::unique_ptr<Job> job;
    Completion done;
  };

  void CheckMine(DeviceModel& model) {
    ASSERT_NE(dynamic_cast<FakeModel*>(&model), nullptr);
    EXPECT_EQ(dynamic_cast<FakeModel&>(model).device, this);
  }
  void CheckMine(DeviceModel& model, DeviceSequence& sequence) {
    CheckMine(model);
    ASSERT_NE(dynamic_cast<FakeSequence*>(&sequence), nullptr);
    EXPECT_EQ(dynamic_cast<FakeSequence&>(sequence).device, this);
  }

  void Serve(Pending pending) {
    Job& job = *pending.job;
    for (JobItem& item : job.items) {
      CheckMine(*job.model, *item.sequence);
      const int64_t query_count = item.attend->query_count;
      item.result.out.assign(1, static_cast<float>(info_.name.back() - '0'));
      item.result.lse.assign(1, static_cast<float>(query_count));
      if (query_count % 2 == 1) {
        item.status = absl::OutOfRangeError(absl::StrCat("item ", query_count));
      }
    }
    job.queue_time_us = job_time_us / 5;
    job.batch_item_count = batch_item_count;
    job.device_time_us = job_time_us;
    if (job.trace) job.stages = {{"score", job_time_us / 2}, {"gather", job_time_us / 2}};
    pending.done(std::move(pending.job));
  }

  const DeviceInfo info_;
  std::mutex mutex_;
  std::deque<Pending> held_;
  std::vector<std::thread> threads_;
};

}  // namespace spillway

#include "host/device/placed_device.h"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstddef>
#include <limits>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "host/base/mutex.h"
#include "host/device/stream_step.h"

namespace spillway {
namespace {

// Counts the sequences of each device, and chooses the device of the next one. Thread-safe.
class Placement {
 public:
  // The place of a sequence on a device, counted while it lives. Move-only.
  class Place {
   public:
    Place(Placement* placement, size_t device, bool is_empty)
        : placement_(placement), device_(device), is_empty_(is_empty) {}
    Place(Place&& o) noexcept
        : placement_(std::exchange(o.placement_, nullptr)),
          device_(o.device_),
          is_empty_(o.is_empty_) {}
    Place& operator=(Place&&) = delete;
    ~Place() {
      if (placement_ != nullptr) placement_->Count(device_, -1, is_empty_ ? -1 : 0);
    }

    size_t device() const { return device_; }
    // From now on, the sequence's memory is part of the device's used memory.
    void SetFilled() {
      if (std::exchange(is_empty_, false)) placement_->Count(device_, 0, -1);
    }

   private:
    Placement* placement_;
    size_t device_;
    bool is_empty_;
  };

  explicit Placement(size_t device_count) : loads_(device_count) {}

  // A place for an empty sequence on the best device that has not refused it, by the rule in the
  // header. REQUIRES: at least one has not.
  Place Choose(const std::vector<DeviceMemory>& memory, const std::vector<bool>& refused) {
    int64_t limit_max = 0;
    for (const DeviceMemory& device : memory) limit_max = std::max(limit_max, device.limit_bytes);
    const int64_t share = limit_max / 16;
    const MutexLock lock(mutex_);
    std::vector<int64_t> free_bytes(memory.size());
    int64_t freest = std::numeric_limits<int64_t>::min();
    for (size_t i = 0; i < memory.size(); ++i) {
      if (refused[i]) continue;
      free_bytes[i] = memory[i].limit_bytes - memory[i].used_bytes - share * loads_[i].empty_count;
      freest = std::max(freest, free_bytes[i]);
    }
    std::optional<size_t> best;
    for (size_t i = 0; i < memory.size(); ++i) {
      if (refused[i] || free_bytes[i] < freest - share) continue;
      if (!best || std::pair(loads_[i].count, -free_bytes[i]) <
                       std::pair(loads_[*best].count, -free_bytes[*best])) {
        best = i;
      }
    }
    assert(best.has_value());
    ++loads_[*best].count;
    ++loads_[*best].empty_count;
    return Place(this, *best, /*is_empty=*/true);
  }

  // A place for a fork, which shares the pages of its source.
  Place Join(size_t device) {
    Count(device, 1, 0);
    return Place(this, device, /*is_empty=*/false);
  }

 private:
  struct Load {
    int64_t count = 0;        // sequences
    int64_t empty_count = 0;  // of these, without an append yet
  };

  void Count(size_t device, int64_t count, int64_t empty_count) {
    const MutexLock lock(mutex_);
    loads_[device].count += count;
    loads_[device].empty_count += empty_count;
  }

  Mutex mutex_;
  std::vector<Load> loads_ ABSL_GUARDED_BY(mutex_);
};

class PlacedModel final : public DeviceModel {
 public:
  explicit PlacedModel(std::vector<std::unique_ptr<DeviceModel>> models)
      : models_(std::move(models)) {}

  const ModelSpec& spec() const override { return models_.front()->spec(); }
  int64_t bytes() const override {
    int64_t sum = 0;
    for (const auto& model : models_) sum += model->bytes();
    return sum;
  }
  DeviceModel& On(size_t device) { return *models_[device]; }

 private:
  const std::vector<std::unique_ptr<DeviceModel>> models_;
};

class PlacedSequence final : public DeviceSequence {
 public:
  PlacedSequence(Placement::Place place, std::unique_ptr<DeviceSequence> sequence)
      : place_(std::move(place)), sequence_(std::move(sequence)) {}

  int64_t index_bytes() const override { return sequence_->index_bytes(); }
  Placement::Place& place() { return place_; }
  size_t device() const { return place_.device(); }
  DeviceSequence& inner() { return *sequence_; }

 private:
  Placement::Place place_;  // destroyed after the memory that it stands for
  const std::unique_ptr<DeviceSequence> sequence_;
};

PlacedModel& Placed(DeviceModel& model) { return static_cast<PlacedModel&>(model); }
PlacedSequence& Placed(DeviceSequence& sequence) { return static_cast<PlacedSequence&>(sequence); }

// A job in parts, one for each device that has sequences of the job. While a part runs, it holds
// its items. Then they return to their places in the whole job, which keeps the pointers to model
// and sequences that it was given.
class SplitJob : public std::enable_shared_from_this<SplitJob> {
 public:
  SplitJob(std::unique_ptr<Job> job, Device::Completion done)
      : job_(std::move(job)), done_(std::move(done)) {}

  void Submit(const std::vector<std::unique_ptr<Device>>& devices) {
    Split(devices.size());
    running_count_.store(parts_.size(), std::memory_order_relaxed);
    for (Part& part : parts_) {
      Device& device = *devices[part.device];
      part.device_name = &device.info().name;
      device.Submit(std::move(part.job),
                    [self = shared_from_this(), &part](std::unique_ptr<Job> job) {
                      part.job = std::move(job);
                      self->Collect(part);
                    });
    }
  }

 private:
  struct Part {
    size_t device;
    const std::string* device_name;
    std::unique_ptr<Job> job;          // null while it runs
    std::vector<size_t> item_indices;  // places of the items in the whole job
  };

  void Split(size_t device_count) {
    PlacedModel& model = Placed(*job_->model);
    std::vector<Part> parts(device_count);
    for (size_t i = 0; i < job_->items.size(); ++i) {
      JobItem& item = job_->items[i];
      PlacedSequence& sequence = Placed(*item.sequence);
      Part& part = parts[sequence.device()];
      if (part.job == nullptr) {
        part.device = sequence.device();
        part.job = std::make_unique<Job>();
        part.job->model = &model.On(part.device);
        part.job->layer = job_->layer;
        part.job->owner = job_->owner;
        part.job->cancel = job_->cancel;
        part.job->trace = job_->trace;
      }
      part.item_indices.push_back(i);
      part.job->items.push_back(std::move(item));
      part.job->items.back().sequence = &sequence.inner();
    }
    std::erase_if(parts, [](const Part& part) { return part.job == nullptr; });
    parts_ = std::move(parts);
  }

  // Called in any thread; parts touch different items.
  void Collect(Part& part) {
    for (size_t i = 0; i < part.item_indices.size(); ++i) {
      JobItem& item = job_->items[part.item_indices[i]];
      DeviceSequence* const sequence = item.sequence;
      item = std::move(part.job->items[i]);
      item.sequence = sequence;
    }
    if (running_count_.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    for (Part& ended : parts_) {
      job_->queue_time_us = std::max(job_->queue_time_us, ended.job->queue_time_us);
      job_->device_time_us = std::max(job_->device_time_us, ended.job->device_time_us);
      job_->batch_item_count = std::max(job_->batch_item_count, ended.job->batch_item_count);
      for (StageTime& stage : ended.job->stages) {
        stage.device = *ended.device_name;
        job_->stages.push_back(std::move(stage));
      }
    }
    done_(std::move(job_));
  }

  std::unique_ptr<Job> job_;
  const Device::Completion done_;
  std::vector<Part> parts_;
  std::atomic<size_t> running_count_{0};
};

class PlacedDevice final : public Device {
 public:
  explicit PlacedDevice(std::vector<std::unique_ptr<Device>> devices)
      : devices_(std::move(devices)), placement_(devices_.size()) {
    const auto join = [this](const char* separator, std::string DeviceInfo::*field) {
      return absl::StrJoin(devices_, separator,
                           [field](std::string* out, const std::unique_ptr<Device>& device) {
                             out->append(device->info().*field);
                           });
    };
    info_.name = join("+", &DeviceInfo::name);
    info_.description = join("; ", &DeviceInfo::description);
    info_.simd_target = devices_.front()->info().simd_target;
    // All devices use the same workers of the process.
    for (const auto& device : devices_) {
      info_.thread_count = std::max(info_.thread_count, device->info().thread_count);
    }
  }

  const DeviceInfo& info() const override { return info_; }

  std::vector<const Device*> parts() const override {
    std::vector<const Device*> parts;
    for (const auto& device : devices_) parts.push_back(device.get());
    return parts;
  }

  // Once, for all devices of the kind.
  absl::Status RegisterMemory(std::span<std::byte> extent) override {
    return devices_.front()->RegisterMemory(extent);
  }
  void UnregisterMemory(std::span<std::byte> extent) override {
    devices_.front()->UnregisterMemory(extent);
  }

  absl::StatusOr<std::unique_ptr<DeviceModel>> CreateModel(const ModelSpec& spec,
                                                           std::span<const std::byte> safetensors,
                                                           const CancelToken* cancel) override {
    std::vector<std::unique_ptr<DeviceModel>> models;
    for (const auto& device : devices_) {
      absl::StatusOr<std::unique_ptr<DeviceModel>> model =
          device->CreateModel(spec, safetensors, cancel);
      if (!model.ok()) return model.status();
      models.push_back(*std::move(model));
    }
    return std::make_unique<PlacedModel>(std::move(models));
  }

  absl::StatusOr<std::unique_ptr<DeviceSequence>> CreateSequence(DeviceModel& model) override {
    std::vector<DeviceMemory> memory;
    for (const auto& device : devices_) memory.push_back(device->memory().value_or(DeviceMemory()));
    std::vector<bool> refused(devices_.size());
    absl::Status status;  // of the first device that refused
    for (size_t n = 0; n < devices_.size(); ++n) {
      Placement::Place place = placement_.Choose(memory, refused);
      absl::StatusOr<std::unique_ptr<DeviceSequence>> sequence =
          devices_[place.device()]->CreateSequence(Placed(model).On(place.device()));
      if (sequence.ok()) {
        return std::make_unique<PlacedSequence>(std::move(place), *std::move(sequence));
      }
      if (!absl::IsResourceExhausted(sequence.status())) return sequence.status();
      status.Update(sequence.status());
      refused[place.device()] = true;
    }
    return status;
  }

  absl::StatusOr<std::unique_ptr<DeviceSequence>> ForkSequence(DeviceModel& model,
                                                               DeviceSequence& source,
                                                               int64_t token_count) override {
    PlacedSequence& placed = Placed(source);
    const size_t device = placed.device();
    Placement::Place place = placement_.Join(device);
    absl::StatusOr<std::unique_ptr<DeviceSequence>> sequence =
        devices_[device]->ForkSequence(Placed(model).On(device), placed.inner(), token_count);
    if (!sequence.ok()) return sequence.status();
    return std::make_unique<PlacedSequence>(std::move(place), *std::move(sequence));
  }

  void TruncateSequence(DeviceModel& model, DeviceSequence& sequence,
                        int64_t token_count) override {
    PlacedSequence& placed = Placed(sequence);
    devices_[placed.device()]->TruncateSequence(Placed(model).On(placed.device()), placed.inner(),
                                                token_count);
  }

  absl::Status PrepareAppend(DeviceModel& model, DeviceSequence& sequence, int layer, int64_t start,
                             int64_t count) override {
    PlacedSequence& placed = Placed(sequence);
    absl::Status status = devices_[placed.device()]->PrepareAppend(
        Placed(model).On(placed.device()), placed.inner(), layer, start, count);
    if (status.ok()) placed.place().SetFilled();
    return status;
  }

  // The sum over all devices; one sequence can only use the memory of its own device.
  std::optional<DeviceMemory> memory() const override {
    std::optional<DeviceMemory> sum;
    for (const auto& device : devices_) {
      const std::optional<DeviceMemory> memory = device->memory();
      if (!memory) continue;
      if (!sum) sum.emplace();
      sum->limit_bytes += memory->limit_bytes;
      sum->used_bytes += memory->used_bytes;
      sum->resident_limit_bytes += memory->resident_limit_bytes;
      sum->resident_used_bytes += memory->resident_used_bytes;
      sum->shared_used_bytes += memory->shared_used_bytes;
    }
    return sum;
  }

  int64_t WeightBytes(const ModelSpec& spec) const override {
    int64_t sum = 0;
    for (const auto& device : devices_) sum += device->WeightBytes(spec);
    return sum;
  }

  int64_t IndexBytesPerToken(const ModelSpec& spec) const override {
    return devices_.front()->IndexBytesPerToken(spec);
  }

  absl::StatusOr<std::unique_ptr<StreamStep>> CreateStreamStep(DeviceModel& model,
                                                               StreamStepOptions options) override {
    size_t device = 0;
    for (size_t i = 0; i < options.parts.size(); ++i) {
      PlacedSequence& placed = Placed(*options.parts[i].sequence);
      if (i > 0 && placed.device() != device) {
        return absl::InvalidArgumentError(
            absl::StrCat("parts[", i, "] is on ", devices_[placed.device()]->info().name,
                         ", parts[0] on ", devices_[device]->info().name,
                         ": the sequences of a step on a stream must be on one device"));
      }
      device = placed.device();
      options.parts[i].sequence = &placed.inner();
    }
    return devices_[device]->CreateStreamStep(Placed(model).On(device), std::move(options));
  }

  Device& HomeOf(DeviceSequence& sequence) override { return *devices_[Placed(sequence).device()]; }
  absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> AllocateShared(std::string_view device,
                                                                     int64_t bytes) override {
    for (const std::unique_ptr<Device>& part : devices_) {
      if (part->info().Is(device)) return part->AllocateShared(device, bytes);
    }
    return Device::AllocateShared(device, bytes);
  }
  // Any device can copy to host memory.
  void Fetch(const FetchWork& work, FetchDone done) override {
    devices_.front()->Fetch(work, std::move(done));
  }

  void Submit(std::unique_ptr<Job> job, Completion done) override {
    const size_t device = job->items.empty() ? 0 : DeviceOf(job->items.front());
    for (const JobItem& item : job->items) {
      if (DeviceOf(item) == device) continue;
      return std::make_shared<SplitJob>(std::move(job), std::move(done))->Submit(devices_);
    }
    // The usual case: the same job, with the device's own model and sequences while it runs.
    DeviceModel* const model = job->model;
    job->model = &Placed(*model).On(device);
    std::vector<DeviceSequence*> sequences;
    sequences.reserve(job->items.size());
    for (JobItem& item : job->items) {
      sequences.push_back(std::exchange(item.sequence, &Placed(*item.sequence).inner()));
    }
    devices_[device]->Submit(std::move(job), [model, sequences = std::move(sequences),
                                              done = std::move(done)](std::unique_ptr<Job> ended) {
      ended->model = model;
      for (size_t i = 0; i < sequences.size(); ++i) ended->items[i].sequence = sequences[i];
      done(std::move(ended));
    });
  }

 private:
  static size_t DeviceOf(const JobItem& item) { return Placed(*item.sequence).device(); }

  const std::vector<std::unique_ptr<Device>> devices_;
  DeviceInfo info_;
  Placement placement_;
};

}  // namespace

std::unique_ptr<Device> CreatePlacedDevice(std::vector<std::unique_ptr<Device>> devices) {
  assert(!devices.empty());
  if (devices.size() == 1) return std::move(devices.front());
  return std::make_unique<PlacedDevice>(std::move(devices));
}

}  // namespace spillway

#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "host/device/device.h"
#include "host/memory/arena.h"
#include "host/memory/page_pool.h"
#include "tests/reference/trace.h"

namespace spillway {

// A device under test. Every suite runs on each device of DeviceFactories().
struct DeviceFactory {
  std::string name;
  std::function<std::unique_ptr<Device>(int thread_count, Arena*, MemoryBudget*)> create;
};
inline void PrintTo(const DeviceFactory& factory, std::ostream* out) { *out << factory.name; }
const std::vector<DeviceFactory>& DeviceFactories();
// The device for suites that run on one device only: the first, or the one that the environment
// variable SPILLWAY_TEST_DEVICE names. Ends the process if no device has that name.
const DeviceFactory& ChosenDevice();

// A valid spec with `group` query heads per KV head.
ModelSpec MakeSpec(int kv_head_count, int group, int head_dim, DType dtype, HashSpec hash = {});

// Whether this build has every method that a policy names.
bool IsBuilt(const Policy& policy);

// A device with memory and one model on it.
class DeviceBench {
 public:
  DeviceBench(const DeviceFactory& factory, const ModelSpec& spec, int thread_count = 0,
              std::span<const std::byte> safetensors = {});
  ~DeviceBench();

  Device& device() { return *device_; }
  DeviceModel& model() { return *model_; }
  PagePool* row_pool() { return row_pool_.get(); }
  const ModelSpec& spec() const { return spec_; }
  // Counts all host memory of the bench.
  MemoryBudget& budget() { return budget_; }

  // Submits a job and waits for it.
  std::unique_ptr<Job> Run(std::unique_ptr<Job> job);

 private:
  const ModelSpec spec_;
  MemoryBudget budget_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<DeviceModel> model_;
  std::unique_ptr<PagePool> row_pool_;
};

// One sequence of the bench's model.
class BenchSequence {
 public:
  explicit BenchSequence(DeviceBench& bench);

  // Appends tokens [from, to) of a context, `chunk` at a time (0: at once).
  absl::Status Append(const reference::Context& context, int64_t from, int64_t to,
                      int64_t chunk = 0, int layer = 0);
  // A decode step: one job that appends as many tokens of a context as there are queries, and
  // attends. If it fails, the append is undone, as in the daemon.
  JobItem Step(const reference::Context& context, const Policy& policy,
               const std::vector<float>& q);
  // The item that such a step submits. q must outlive the job.
  JobItem StepItem(const reference::Context& context, const Policy& policy,
                   const std::vector<float>& q);
  BenchSequence Fork(int64_t token_count);
  void Truncate(int64_t token_count);

  // An item that attends with fp32 queries q [T][H_q][d]. If `visible` is empty, the queries are
  // causal over the last T tokens. q must outlive the job.
  JobItem AttendItem(const Policy& policy, const std::vector<float>& q, bool select_only,
                     std::vector<int64_t> visible = {}, int layer = 0);
  JobItem Attend(const Policy& policy, const std::vector<float>& q,
                 std::vector<int64_t> visible = {}, int layer = 0);
  JobItem Select(const Policy& policy, const std::vector<float>& q,
                 std::vector<int64_t> visible = {}, int layer = 0);

  // Submits a job with only this item and waits for it.
  JobItem RunOne(JobItem item, int layer = 0);

  int64_t token_count(int layer = 0) const { return rows_[layer]->token_count(); }
  int64_t index_bytes() const { return device_sequence_->index_bytes(); }

 private:
  BenchSequence(DeviceBench& bench, std::unique_ptr<DeviceSequence> sequence);
  absl::Status PrepareAppend(int64_t count, int layer);

  DeviceBench* bench_;
  std::unique_ptr<DeviceSequence> device_sequence_;
  std::vector<std::unique_ptr<LayerRows>> rows_;
  std::vector<std::byte> step_k_, step_v_;  // K and V of the current step
};

// The output of query t, head h.
std::span<const float> OutputOf(const ModelSpec& spec, const AttendResult& result, int64_t t,
                                int h);

}  // namespace spillway

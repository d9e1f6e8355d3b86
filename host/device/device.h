#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/base/certificate.h"
#include "host/base/selection.h"
#include "host/device/cancel.h"
#include "host/device/fetch_rows.h"
#include "host/device/shared_device_memory.h"
#include "host/memory/layer_rows.h"
#include "host/model/model_spec.h"
#include "host/policy/policy.h"

namespace spillway {

class QueueWaits;
class StreamStep;
struct StreamStepOptions;

struct DeviceInfo {
  std::string name;         // "cpu:0"
  std::string description;  // for people
  std::string uuid;         // of a GPU; empty for a CPU
  int thread_count = 0;
  std::string simd_target;
  // Whether this process uses the GPU through MPS; nullopt if the driver does not say. False for a
  // CPU.
  std::optional<bool> mps = false;

  // Whether `device` is the name or the UUID of this device.
  bool Is(std::string_view device) const {
    return !device.empty() && (device == name || device == uuid);
  }
};

// Memory of the device itself, in bytes.
struct DeviceMemory {
  int64_t limit_bytes = 0;
  int64_t used_bytes = 0;  // without copies of rows
  // The most that copies of all rows of some sequences may take, and the bytes that they have. They
  // make room for codes.
  int64_t resident_limit_bytes = 0;
  int64_t resident_used_bytes = 0;
  // Memory that other processes map; it counts against the limit.
  int64_t shared_used_bytes = 0;
};

// A model's weights on a device (rotations, MLPs). Opaque; thread-safe.
class DeviceModel {
 public:
  virtual ~DeviceModel() = default;
  virtual const ModelSpec& spec() const = 0;
  // Bytes of host memory that it holds.
  virtual int64_t bytes() const = 0;
};

// A device's index of one sequence (codes, factors, centres). Opaque. Not thread-safe; Device says
// what the engine guarantees.
class DeviceSequence {
 public:
  virtual ~DeviceSequence() = default;
  virtual int64_t index_bytes() const = 0;
};

// New K/V of one (sequence, layer). Their pages, for rows and for codes, were prepared before. The
// job writes and encodes the rows, then commits rows->token_count() = start + count.
struct AppendWork {
  LayerRows* rows = nullptr;
  int64_t start = 0;
  int64_t count = 0;
  RowSource k;  // [H_kv, count, d] in the model's dtype
  RowSource v;  // the same
  // The caller may still change the source. So the rows are checked after they are written: an
  // element that is not finite fails the item with OUT_OF_RANGE, and nothing is committed. If
  // false, the caller has checked that the source is finite.
  bool shared_source = false;
  // The source is in GPU memory, with rows aligned to 16 bytes, and is complete when the job
  // starts. A device that cannot read it refuses the item. The rows are checked as with
  // shared_source, but they may be read a second time when they are written.
  bool on_gpu = false;
  // Another process can change the source in GPU memory, so what is checked must be what is
  // written.
  bool read_once = false;
  // The rows are already in the arena, written by an earlier process, and there is no source. The
  // job only commits and indexes them.
  bool rows_present = false;

  // K and V in C order.
  static AppendWork Dense(LayerRows* rows, int64_t start, int64_t count, const void* k,
                          const void* v) {
    const int64_t bytes = rows->format().element_bytes() / 2;
    return {rows, start, count, RowSource::Dense(k, count, bytes),
            RowSource::Dense(v, count, bytes)};
  }
};

// Queries of one (sequence, layer). Devices only read it.
struct AttendQuery {
  const LayerRows* rows = nullptr;
  Policy policy;  // valid for the model
  // [H_kv], one for each KV head; if empty, the policy's own tail is used for all.
  std::vector<TailPolicy> tails;
  DType q_dtype = DType::kF32;
  const std::byte* q = nullptr;  // [T, H_q, d]
  int64_t query_count = 0;       // T
  std::vector<int64_t> visible;  // [T], each in [1, rows after the append]
  // Choose rows only: the result has selections, but no out and lse.
  bool select_only = false;
  // The online audit measures errors of such attends, and tightens heads with too many violations.
  // So certificates promise the bound whatever the error of the ranks.
  bool audited = false;

  const TailPolicy& TailOf(int kv_head) const { return tails.empty() ? policy : tails[kv_head]; }
  // Whether the certificate of a query and KV head promises the bound if the estimated error is
  // within epsilon.
  bool MayPromise(const ModelSpec& spec, int kv_head, int64_t query) const {
    const TailPolicy& tail = TailOf(kv_head);
    return BoundsTheError(tail.tail, tail.bound) &&
           (audited || RanksCarryGuarantee(policy, tail, spec, visible[query]));
  }
};

// The result of an attend; filled by the device.
struct AttendResult {
  std::vector<float> out;                   // [T, H_q, d]
  std::vector<float> lse;                   // [T, H_q], natural log; with sink logits
  std::vector<Certificate> certificates;    // [T, H_q]
  std::vector<int64_t> touched_row_counts;  // [T, groups]
  int64_t moved_row_count = 0;              // how many of these rows came over a link
  std::vector<Selection> selections;        // [T, groups], with select_only
};

// Work on one sequence: an append, an attend, or both in that order.
struct JobItem {
  DeviceSequence* sequence = nullptr;
  std::optional<AppendWork> append;
  std::optional<AttendQuery> attend;
  AttendResult result;  // of the attend
  // Filled. An item that fails does not affect the others. If an item has both an append and
  // an attend, and the attend fails, the device keeps the append.
  absl::Status status;
};

// A stage of a job and the device time that it took.
struct StageTime {
  std::string name;
  double us = 0;
  std::string device = {};  // the device's name, if the job ran on several devices
};

// One layer's work for sequences of one model, served as one parallel job.
struct Job {
  DeviceModel* model = nullptr;
  int layer = 0;
  std::vector<JobItem> items;
  std::shared_ptr<CancelToken> cancel;  // may be null
  // Number of the account that the job belongs to. Owners with waiting jobs take turns.
  int64_t owner = 0;
  // The submitting thread waits for the job. So a device that computes on the CPU should do it in
  // that thread.
  bool waited_for = false;
  double queue_time_us = 0;   // filled: from Submit() until the device began
  double device_time_us = 0;  // filled: from then until the end
  // Filled: the number of items that ran together, if the device joined several jobs; else 0.
  int64_t batch_item_count = 0;
  // For benchmarks: makes a GPU report the time of each kernel instead of each stage. This slows
  // the job down.
  bool trace = false;
  // Filled, see host/device/job_stage.h. kAppend and kDense are totals of the job. For the stages
  // of sparse attends, a GPU reports totals, from a stage's first kernel to the next stage's first
  // kernel; a CPU reports the times of one unit (one query and group) with the most visible
  // tokens.
  std::vector<StageTime> stages;
};

// Computes codes, selections and attention over rows in host memory. A device guards its own shared
// state. The engine guarantees that no two jobs use the same layer of a sequence at once, and that
// no other call uses a sequence while a job does. Otherwise, all methods are thread-safe. A device
// may call a completion in any thread, long after Submit() has returned; the budgets and counts of
// a job are known only then.
class Device {
 public:
  using Completion = std::function<void(std::unique_ptr<Job>)>;

  virtual ~Device() = default;
  virtual const DeviceInfo& info() const = 0;
  // The devices that sequences live on: this one, or all those that this one stands for. Each has
  // its own info() and memory().
  virtual std::vector<const Device*> parts() const { return {this}; }
  // How long jobs waited in the device's queue. Null: the device has no queue of its own, but its
  // parts may have one.
  virtual const QueueWaits* queue_waits() const { return nullptr; }
  // OK, or the reason why no call to the device can succeed in this process any more: the device is
  // gone, or a CUDA error has corrupted the process's context. Takes a moment. For a device that
  // stands for several, ask each part.
  virtual absl::Status CheckUsable() const { return absl::OkStatus(); }

  // An extent of host memory in which rows will live. Called before its first use and after its
  // last, on one device of each kind: memory that one CUDA device pins is pinned for all of them,
  // and CUDA refuses to pin it again.
  virtual absl::Status RegisterMemory(std::span<std::byte> extent) = 0;
  virtual void UnregisterMemory(std::span<std::byte> extent) = 0;

  // safetensors: the weights if spec.has_weights(), else empty; not kept. INVALID_ARGUMENT names
  // the tensor that is missing or has a wrong shape. With many layers this takes long. It computes
  // in the caller's thread and in threads that jobs leave idle. cancel may be null; it is checked
  // for every layer.
  virtual absl::StatusOr<std::unique_ptr<DeviceModel>> CreateModel(
      const ModelSpec& spec, std::span<const std::byte> safetensors,
      const CancelToken* cancel = nullptr) = 0;

  // The model must outlive its sequences.
  virtual absl::StatusOr<std::unique_ptr<DeviceSequence>> CreateSequence(DeviceModel& model) = 0;
  // A copy of the first token_count tokens of every layer, with shared pages.
  virtual absl::StatusOr<std::unique_ptr<DeviceSequence>> ForkSequence(DeviceModel& model,
                                                                       DeviceSequence& source,
                                                                       int64_t token_count) = 0;
  // Cuts each longer layer to its first token_count tokens.
  virtual void TruncateSequence(DeviceModel& model, DeviceSequence& sequence,
                                int64_t token_count) = 0;

  // Makes room for the codes of tokens [start, start + count) of a layer, so that the job that
  // appends them cannot run out of memory. start is the layer's length. If the device still has
  // codes of tokens at or beyond start, because an append was undone when its attend failed, it
  // drops them first. RESOURCE_EXHAUSTED changes nothing visible. Room that no job uses is released
  // by the next truncation or append.
  virtual absl::Status PrepareAppend(DeviceModel& model, DeviceSequence& sequence, int layer,
                                     int64_t start, int64_t count) = 0;

  // The memory that holds the codes, if that is not the arena of the rows; the total of all parts.
  virtual std::optional<DeviceMemory> memory() const { return std::nullopt; }
  // Host memory that CreateModel() takes for a model's weights, at most; bytes.
  virtual int64_t WeightBytes(const ModelSpec& spec) const = 0;
  // Device bytes of codes per token of one layer, all KV heads.
  virtual int64_t IndexBytesPerToken(const ModelSpec& spec) const = 0;

  // Decode steps on streams of the caller. The model and the sequences must outlive the result.
  // UNIMPLEMENTED if the device has no streams.
  virtual absl::StatusOr<std::unique_ptr<StreamStep>> CreateStreamStep(DeviceModel& model,
                                                                       StreamStepOptions options);

  // The device that a sequence lives on: this one, or one of parts().
  virtual Device& HomeOf(DeviceSequence&) { return *this; }
  using FetchDone = std::function<void(absl::Status)>;
  // Copies rows to memory of the caller. The caller keeps that memory and `work` until done is
  // called, once, in any thread. If its status is OK, all rows have been copied. INVALID_ARGUMENT
  // for memory that the device cannot write.
  virtual void Fetch(const FetchWork& work, FetchDone done) = 0;

  // Allocates memory that other processes can map, `bytes` rounded up, on the device of that name
  // or UUID: this device or one of its parts. INVALID_ARGUMENT if there is no such device or it has
  // no memory of its own; UNIMPLEMENTED if its driver cannot share memory; RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> AllocateShared(
      std::string_view device, int64_t bytes);
  // Serves one other process with `bytes` of shared memory and with input_bytes of memory for a
  // copy of its inputs. REQUIRES: HomeOf() has returned this device. UNIMPLEMENTED if the device
  // has no memory of its own, or its driver cannot share memory; RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<std::unique_ptr<DeviceExchange>> OpenExchange(int64_t bytes,
                                                                       int64_t input_bytes);

  // Starts a job; done is called exactly once, with the job.
  virtual void Submit(std::unique_ptr<Job> job, Completion done) = 0;
};

}  // namespace spillway

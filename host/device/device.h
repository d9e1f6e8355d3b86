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
  std::string uuid;         // of a GPU, else empty
  int thread_count = 0;
  std::string simd_target;
  // Whether this process shares a GPU by way of MPS; unknown where the driver
  // does not say. Of a CPU: no.
  std::optional<bool> mps = false;

  // Whether this is its name or its UUID.
  bool Is(std::string_view device) const {
    return !device.empty() && (device == name || device == uuid);
  }
};

// Memory of a device's own, bytes.
struct DeviceMemory {
  int64_t limit_bytes = 0;
  int64_t used_bytes = 0;
  // Of the limit, for copies of all rows of some sequences, and what these take.
  int64_t resident_limit_bytes = 0;
  int64_t resident_used_bytes = 0;
  // What other processes map, which counts against the limit.
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

// What a device keeps of one sequence (codes, factors, centres). Opaque; not
// thread-safe: the engine orders what touches one sequence.
class DeviceSequence {
 public:
  virtual ~DeviceSequence() = default;
  virtual int64_t index_bytes() const = 0;
};

// New K/V of one (sequence, layer). Rows and device state were prepared; the
// job writes and encodes, then commits rows->token_count() = start + count.
struct AppendWork {
  LayerRows* rows = nullptr;
  int64_t start = 0;
  int64_t count = 0;
  RowSource k;  // [H_kv, count, d] in the model's dtype
  RowSource v;  // the same
  // The caller may still change the source: what was written is looked at, and
  // an element that is not finite fails the item with OUT_OF_RANGE and commits
  // nothing. Else the source is known to be finite.
  bool shared_source = false;
  // The source lies in GPU memory, rows aligned to 16 bytes, and is there when the job
  // starts: a device that does not read it refuses the item. As a shared source it
  // is looked at as it is written.
  bool on_gpu = false;
  // The rows are there already, of a process before this one, and there is no source: what
  // remains is to commit and to index them.
  bool rows_present = false;

  // K and V in C order.
  static AppendWork Dense(LayerRows* rows, int64_t start, int64_t count, const void* k,
                          const void* v) {
    const int64_t bytes = rows->row_bytes() / 2;
    return {rows, start, count, RowSource::Dense(k, count, bytes),
            RowSource::Dense(v, count, bytes)};
  }
};

// Queries of one (sequence, layer). Devices only read it.
struct AttendQuery {
  const LayerRows* rows = nullptr;
  Policy policy;  // valid for the model
  // [H_kv], or empty: the policy's own for all.
  std::vector<TailPolicy> tails;
  DType q_dtype = DType::kF32;
  const std::byte* q = nullptr;  // [T, H_q, d]
  int64_t query_count = 0;       // T
  std::vector<int64_t> visible;  // [T], each in [1, rows after the append]
  // Choose rows only: the result has selections, but no out and lse.
  bool select_only = false;
  // Errors are watched, and heads made to keep their promise: certificates
  // promise whatever the ranks.
  bool audited = false;

  const TailPolicy& TailOf(int kv_head) const { return tails.empty() ? policy : tails[kv_head]; }
  // Whether an estimate within epsilon is a promise, for a query of a KV head.
  bool MayPromise(const ModelSpec& spec, int kv_head, int64_t query) const {
    const TailPolicy& tail = TailOf(kv_head);
    return BoundsTheError(tail.tail, tail.bound) &&
           (audited || RanksCarryGuarantee(policy, tail, spec, visible[query]));
  }
};

// What an attend comes to; filled by the device.
struct AttendResult {
  std::vector<float> out;                   // [T, H_q, d]
  std::vector<float> lse;                   // [T, H_q], natural log
  std::vector<Certificate> certificates;    // [T, H_q]
  std::vector<int64_t> touched_row_counts;  // [T, H_kv]
  int64_t moved_row_count = 0;              // of those, rows that came over a link
  std::vector<Selection> selections;        // [T, H_kv], with select_only
};

// Work on one sequence: an append, an attend, or both in that order.
struct JobItem {
  DeviceSequence* sequence = nullptr;
  std::optional<AppendWork> append;
  std::optional<AttendQuery> attend;
  AttendResult result;  // of the attend
  absl::Status status;  // filled; an item that fails leaves the others alone.
                        // With both, an attend that fails keeps the append.
};

// A part of a job and the device time that it took.
struct StageTime {
  std::string name;
  double us = 0;
  std::string device = {};  // its name, where the job ran on several
};

// One layer's work for sequences of one model, served as one parallel job.
struct Job {
  DeviceModel* model = nullptr;
  int layer = 0;
  std::vector<JobItem> items;
  std::shared_ptr<CancelToken> cancel;  // may be null
  // Whose it is, a number: where several owners wait they take turns.
  int64_t owner = 0;
  // The thread that submits it waits for it: a device that computes on the CPU
  // had better do so there.
  bool waited_for = false;
  double queue_time_us = 0;   // filled: from Submit until the device began
  double device_time_us = 0;  // filled: from then on
  // For benchmarks: asks a GPU for the time of each kernel in place of its stages', which makes a
  // job slower.
  bool trace = false;
  // Filled (host/device/job_stage.h): of all appends and dense attends. Of sparse attends by a GPU
  // of all, from a stage's first kernel to that of the next; by a CPU of one query and KV head of
  // the longest.
  std::vector<StageTime> stages;
};

// Computes codes, selections and attention over rows in host memory. Shared
// state is the device's own; the engine guarantees that no two jobs touch the same
// layer of a sequence at once, and no job and another call the same sequence. All methods are
// thread-safe otherwise. A device may answer from any thread and long after
// Submit returned; counts and budgets are known only with the completion.
class Device {
 public:
  using Completion = std::function<void(std::unique_ptr<Job>)>;

  virtual ~Device() = default;
  virtual const DeviceInfo& info() const = 0;
  // The devices that sequences live on: this one, or each of those that this
  // one stands for. Their info() and memory() are each one's own.
  virtual std::vector<const Device*> parts() const { return {this}; }
  // How long jobs waited for it. Null: it has no queue of its own, but parts may have.
  virtual const QueueWaits* queue_waits() const { return nullptr; }
  // OK, or why nothing that the device is asked for can succeed in this process any more: it is
  // gone, or an error of CUDA's has taken the process's use of it. Takes a moment. Of a device
  // that stands for several each part says it for itself.
  virtual absl::Status CheckUsable() const { return absl::OkStatus(); }

  // A extent of host memory that rows will live in; called before it is used
  // and after its last use, on one device for every device of its kind: what
  // one CUDA device pins is pinned for all, and CUDA refuses a second time.
  virtual absl::Status RegisterMemory(std::span<std::byte> extent) = 0;
  virtual void UnregisterMemory(std::span<std::byte> extent) = 0;

  // safetensors: the weights when spec.has_weights(), else empty; not kept.
  // INVALID_ARGUMENT names the tensor that is missing or misshapen. Computes for long where there
  // are many layers, in the caller's thread and those that jobs leave idle; cancel, which may be
  // null, is looked at for every layer.
  virtual absl::StatusOr<std::unique_ptr<DeviceModel>> CreateModel(
      const ModelSpec& spec, std::span<const std::byte> safetensors,
      const CancelToken* cancel = nullptr) = 0;

  // The model outlives its sequences.
  virtual absl::StatusOr<std::unique_ptr<DeviceSequence>> CreateSequence(DeviceModel& model) = 0;
  // A copy of every layer's first token_count tokens, pages shared.
  virtual absl::StatusOr<std::unique_ptr<DeviceSequence>> ForkSequence(DeviceModel& model,
                                                                       DeviceSequence& source,
                                                                       int64_t token_count) = 0;
  // Keeps the first token_count tokens of each longer layer.
  virtual void TruncateSequence(DeviceModel& model, DeviceSequence& sequence,
                                int64_t token_count) = 0;

  // Makes room for the codes of tokens [start, start + count) of a layer, so
  // that the job that appends them cannot fail for want of memory. start is
  // the layer's length: what the device still has of tokens at or beyond it,
  // of an append that was undone because its attend failed, is forgotten
  // first. RESOURCE_EXHAUSTED changes nothing that can be seen; room that a
  // job does not use goes with the next truncation or append.
  virtual absl::Status PrepareAppend(DeviceModel& model, DeviceSequence& sequence, int layer,
                                     int64_t start, int64_t count) = 0;

  // The memory that codes live in, where that is not the rows' arena; of all
  // parts together.
  virtual std::optional<DeviceMemory> memory() const { return std::nullopt; }
  // Host memory that CreateModel takes for a model's weights, at most.
  virtual int64_t WeightBytes(const ModelSpec& spec) const = 0;
  // Device bytes of codes per token of one layer, all KV heads.
  virtual int64_t IndexBytesPerToken(const ModelSpec& spec) const = 0;

  // Decode steps on streams of the caller's. The model and the sequences outlive
  // them. UNIMPLEMENTED where the device has no streams.
  virtual absl::StatusOr<std::unique_ptr<StreamStep>> CreateStreamStep(DeviceModel& model,
                                                                       StreamStepOptions options);

  // The device that a sequence lives on: this one, or one of parts().
  virtual Device& HomeOf(DeviceSequence&) { return *this; }
  using FetchDone = std::function<void(absl::Status)>;
  // Copies rows to memory of the caller's. That and the work stay until done is called,
  // once, from any thread: all rows are there then, or an error says why not.
  // INVALID_ARGUMENT for memory that the device does not write.
  virtual void Fetch(const FetchWork& work, FetchDone done) = 0;

  // Memory of the device, this one or a part, of that name or UUID, that other processes
  // can map: `bytes` rounded up. INVALID_ARGUMENT for a device that is not there or has no
  // memory of its own; UNIMPLEMENTED where its driver shares none; RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> AllocateShared(
      std::string_view device, int64_t bytes);
  // For one other process, with so much of shared memory and of inputs. REQUIRES: this
  // is what HomeOf() has given. UNIMPLEMENTED where the device has no memory of its own, or
  // its driver shares none; RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<std::unique_ptr<DeviceExchange>> OpenExchange(int64_t bytes,
                                                                       int64_t input_bytes);

  // Starts a job; done is called exactly once, with the job.
  virtual void Submit(std::unique_ptr<Job> job, Completion done) = 0;
};

}  // namespace spillway

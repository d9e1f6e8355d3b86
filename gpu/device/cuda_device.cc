#include "gpu/device/cuda_device.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gpu/cuda/current_device.h"
#include "gpu/cuda/device_backing.h"
#include "gpu/cuda/mps.h"
#include "gpu/cuda/poll.h"
#include "gpu/device/job_run.h"
#include "gpu/device/row_fetcher.h"
#include "gpu/device/shared_heap.h"
#include "gpu/device/stream_step.h"
#include "host/base/elements.h"
#include "host/base/mutex.h"
#include "host/base/status_macros.h"
#include "host/device/job_queue.h"
#include "host/device/queue_waits.h"
#include "host/device/workspace_shares.h"
#include "host/memory/slab_limit.h"
#include "tbb/task_arena.h"

namespace spillway {
namespace {

using cuda::CudaModel;
using cuda::CudaSequence;
using cuda::CurrentDevice;
using cuda::JobRun;
using cuda::StreamSlot;

// Of the memory without workspaces, copies of rows may take at most seven eighths: they make room
// for codes that need it, but not at once.
constexpr int64_t kCopiesOf = 8;
// And they leave a thirty-second of it free, for codes of tokens that come before the next step.
constexpr int64_t kSpareShare = 32;

std::string UuidName(const cudaUUID_t& uuid) {
  std::string name = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) name += '-';
    name += absl::StrFormat("%02x", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return name;
}

// Serves jobs on one GPU. Decode steps and longer jobs have separate slots. A job is enqueued by
// the thread that submits it or, if all slots were taken, by the thread that finishes jobs.
class CudaDevice final : public Device {
 public:
  static absl::StatusOr<std::unique_ptr<Device>> Create(const CudaDeviceOptions& options,
                                                        MemoryBudget* host_budget);
  ~CudaDevice() override {
    {
      const MutexLock lock(mutex_);
      stopping_ = true;
    }
    changed_.NotifyAll();
    if (finisher_.joinable()) finisher_.join();
  }

  const DeviceInfo& info() const override { return info_; }
  const QueueWaits* queue_waits() const override { return &queue_waits_; }

  // If an error has corrupted the context, every call returns it.
  absl::Status CheckUsable() const override {
    const CurrentDevice current(ordinal_);
    RETURN_IF_ERROR(current.status());
    // Not a slot's stream, which may be captured: the query would fail, and the capture too.
    const cudaError_t error = cudaStreamQuery(probe_.get());
    return error == cudaErrorNotReady ? absl::OkStatus() : cuda::ToStatus(error, info_.name);
  }

  absl::Status RegisterMemory(std::span<std::byte> extent) override {
    const CurrentDevice current(ordinal_);
    RETURN_IF_ERROR(current.status());
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaHostRegister(
        extent.data(), extent.size(), cudaHostRegisterPortable | cudaHostRegisterMapped));
    return absl::OkStatus();
  }
  void UnregisterMemory(std::span<std::byte> extent) override {
    // Any thread may call this. Without a current GPU, CUDA would create a context on GPU 0.
    const CurrentDevice current(ordinal_);
    SPILLWAY_CUDA_REPORT(cudaHostUnregister(extent.data()));
  }

  absl::StatusOr<std::unique_ptr<DeviceModel>> CreateModel(const ModelSpec& spec,
                                                           std::span<const std::byte> safetensors,
                                                           const CancelToken* cancel) override {
    const CurrentDevice current(ordinal_);
    RETURN_IF_ERROR(current.status());
    if (const size_t needed = cuda::CodeSumsSharedBytes(spec.group());
        spec.value_bits() > 0 && needed > static_cast<size_t>(gpu_.block_shared_bytes)) {
      return absl::UnimplementedError(absl::StrCat(
          "hash_weights.rotation.value_bits = ", spec.value_bits(), " with ", spec.group(),
          " query heads a KV head needs ", needed, " bytes of shared memory a block, and ",
          info_.name, " has ", gpu_.block_shared_bytes, ": value_bits is 0 there"));
    }
    ASSIGN_OR_RETURN(std::unique_ptr<cuda::ModelMethods> methods,
                     cuda::CreateModelMethods(spec, safetensors));
    return CudaModel::Create(spec, arena_.get(), copy_limit_.get(), &budget_, std::move(methods),
                             cancel);
  }

  absl::StatusOr<std::unique_ptr<DeviceSequence>> CreateSequence(DeviceModel& model) override {
    return std::make_unique<CudaSequence>(static_cast<CudaModel&>(model), &blocks_, &residency_);
  }

  absl::StatusOr<std::unique_ptr<DeviceSequence>> ForkSequence(DeviceModel& model,
                                                               DeviceSequence& source,
                                                               int64_t token_count) override {
    auto& of_source = static_cast<CudaSequence&>(source);
    const ResidencyUse use = of_source.Use();
    return std::make_unique<CudaSequence>(static_cast<CudaModel&>(model), &blocks_, &residency_,
                                          of_source, token_count);
  }

  void TruncateSequence(DeviceModel&, DeviceSequence& sequence, int64_t token_count) override {
    auto& truncated = static_cast<CudaSequence&>(sequence);
    const ResidencyUse use = truncated.Use();
    for (cuda::LayerIndex& layer : truncated.layers) layer.Truncate(token_count);
  }

  absl::Status PrepareAppend(DeviceModel&, DeviceSequence& sequence, int layer, int64_t start,
                             int64_t count) override {
    auto& appended = static_cast<CudaSequence&>(sequence);
    const ResidencyUse use = appended.Use();
    return appended.Prepare(layer, start, count);
  }

  int64_t WeightBytes(const ModelSpec& spec) const override { return CudaModel::HostBytesOf(spec); }

  int64_t IndexBytesPerToken(const ModelSpec& spec) const override {
    const int64_t page_bytes = CudaModel::IndexPageBytes(spec);
    const double resident = spec.has_index() ? spec.resident_sample_fraction : 0;
    return spec.kv_head_count *
           ((page_bytes + kPageTokenCount - 1) / kPageTokenCount +
            static_cast<int64_t>(std::ceil(resident * static_cast<double>(spec.row_bytes()))));
  }

  std::optional<DeviceMemory> memory() const override {
    // Slabs that are committed and free count as free, and so do those of copies.
    DeviceMemory memory;
    memory.limit_bytes = budget_.limit_bytes();
    memory.used_bytes = budget_.limit_bytes() - arena_->free_bytes();
    if (copy_limit_ != nullptr) {
      memory.resident_limit_bytes = copy_limit_->limit_bytes();
      memory.resident_used_bytes = copy_limit_->used_bytes();
      memory.used_bytes -= memory.resident_used_bytes;
    }
    memory.shared_used_bytes = shared_->used_bytes();
    return memory;
  }

  absl::StatusOr<std::unique_ptr<StreamStep>> CreateStreamStep(DeviceModel& model,
                                                               StreamStepOptions options) override {
    return cuda::CreateStreamStep({ordinal_, gpu_, this, static_cast<CudaModel*>(&model),
                                   &step_resources_, shares_.step_bytes, reproducible_, &workers_},
                                  std::move(options));
  }

  absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> AllocateShared(std::string_view device,
                                                                     int64_t bytes) override {
    return info_.Is(device) ? shared_->Allocate(bytes) : Device::AllocateShared(device, bytes);
  }
  absl::StatusOr<std::unique_ptr<DeviceExchange>> OpenExchange(int64_t bytes,
                                                               int64_t input_bytes) override {
    return shared_->OpenExchange(bytes, input_bytes);
  }

  void Fetch(const FetchWork& work, FetchDone done) override {
    if (work.on_gpu) return fetcher_->Fetch(work, std::move(done));
    workers_.enqueue([&work, done = std::move(done)] { done(FetchRows(work)); });
  }

  void Submit(std::unique_ptr<Job> job, Completion done) override {
    {
      const MutexLock lock(mutex_);
      waiting_.Push({std::move(job), std::move(done)});
    }
    StartWaiting();
  }

 private:
  struct Running {
    JobBatch batch;
    JobKind kind;
    StreamSlot* slot;
    std::vector<ResidencyUse> uses;  // of the job's sequences
    std::unique_ptr<JobRun> run;
    absl::Status status;  // of Enqueue()
  };

  CudaDevice(const CudaDeviceOptions& options, int64_t memory_limit_bytes,
             const WorkspaceShares& shares, int thread_count, MemoryBudget* host_budget)
      : ordinal_(options.ordinal),
        reproducible_(options.reproducible),
        host_budget_(host_budget),
        shares_(shares),
        budget_(memory_limit_bytes, 0, "--gpu-memory-limit"),
        step_resources_(options.ordinal, shares.step_bytes, &budget_, host_budget),
        workers_(thread_count) {}

  // Starts waiting jobs on idle slots.
  void StartWaiting();
  void Start(JobBatch batch, JobKind kind, StreamSlot* slot);
  // Loop of the thread that waits for the GPU.
  void Finish();
  void End(Running running);
  std::vector<StreamSlot*>& Idle(JobKind kind) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return idle_[static_cast<size_t>(kind)];
  }

  const int ordinal_;
  const bool reproducible_;
  MemoryBudget* const host_budget_;
  const WorkspaceShares shares_;
  cuda::Gpu gpu_;
  DeviceInfo info_;
  MemoryBudget budget_;  // GPU memory
  cuda::StepResourcePool step_resources_;
  std::unique_ptr<Arena> arena_;  // codes, tables and copies
  // For the copies of all rows; null without such copies.
  std::unique_ptr<SlabLimit> copy_limit_;
  Residency residency_;
  cuda::BlockPools blocks_;
  tbb::task_arena workers_;
  std::vector<std::unique_ptr<StreamSlot>> slots_;
  cuda::Stream probe_;  // nothing runs on it: its state is that of the context
  std::unique_ptr<cuda::RowFetcher> fetcher_;
  std::unique_ptr<cuda::SharedHeap> shared_;
  QueueWaits queue_waits_;

  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<StreamSlot*> idle_[std::size(kJobKinds)] ABSL_GUARDED_BY(mutex_);
  JobQueue waiting_ ABSL_GUARDED_BY(mutex_);
  // Jobs that the finisher has not taken over yet.
  std::vector<Running> started_ ABSL_GUARDED_BY(mutex_);
  std::thread finisher_;
};

absl::StatusOr<std::unique_ptr<Device>> CudaDevice::Create(const CudaDeviceOptions& options,
                                                           MemoryBudget* host_budget) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  cudaGetLastError();
  if (options.ordinal < 0 || options.ordinal >= count) {
    return absl::NotFoundError(
        absl::StrCat("there is no GPU ", options.ordinal, ": CUDA sees ", count, " GPUs"));
  }
  const CurrentDevice current(options.ordinal);
  RETURN_IF_ERROR(current.status());
  cudaDeviceProp properties;
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaGetDeviceProperties(&properties, options.ordinal));
  int host_pointers = 0;
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaDeviceGetAttribute(
      &host_pointers, cudaDevAttrCanUseHostPointerForRegisteredMem, options.ordinal));
  if (host_pointers == 0) {
    return absl::UnimplementedError(
        absl::StrCat(properties.name, " cannot read registered host memory at its own address"));
  }
  size_t free = 0, total = 0;
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaMemGetInfo(&free, &total));
  const int64_t limit = options.memory_limit_bytes > 0 ? options.memory_limit_bytes
                                                       : static_cast<int64_t>(free / 10 * 9);
  const int64_t workspace = options.workspace_bytes;
  if (workspace > 0 && (workspace < WorkspaceShares::kTotalMin || workspace > limit / 2)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--gpu-workspace: ", workspace, " bytes are not in [", WorkspaceShares::kTotalMin, ", ",
        limit / 2, "]; the latter is half of the GPU memory limit of ", limit));
  }
  const WorkspaceShares shares =
      WorkspaceShares::Of(limit, options.resident_limit_bytes >= kSlabBytes, workspace);
  const int64_t arena_bytes = limit - shares.total_bytes;
  const int64_t resident_most = arena_bytes / kCopiesOf * (kCopiesOf - 1);
  const int64_t resident_limit =
      (options.resident_limit_bytes == kMostResident ? resident_most
                                                     : options.resident_limit_bytes) /
      kSlabBytes * kSlabBytes;
  if (resident_limit > resident_most) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--gpu-resident-limit: ", options.resident_limit_bytes, " bytes are more than ",
        resident_most, ", seven eighths of the GPU memory limit of ", limit, " without the ",
        shares.total_bytes, " of workspaces: codes need the rest"));
  }
  const int threads =
      options.thread_count > 0 ? options.thread_count : tbb::this_task_arena::max_concurrency();
  std::unique_ptr<CudaDevice> device(new CudaDevice(options, limit, shares, threads, host_budget));
  device->gpu_ = {properties.multiProcessorCount,
                  static_cast<int>(properties.sharedMemPerBlockOptin), properties.major >= 9};
  int clock_khz = 0, width_bits = 0;
  if (cudaDeviceGetAttribute(&clock_khz, cudaDevAttrMemoryClockRate, options.ordinal) ==
          cudaSuccess &&
      cudaDeviceGetAttribute(&width_bits, cudaDevAttrGlobalMemoryBusWidth, options.ordinal) ==
          cudaSuccess) {
    // Two transfers a clock.
    device->gpu_.memory_bytes_per_us = 2.0 * clock_khz / 1000 * width_bits / 8;
  }
  cudaGetLastError();
  absl::StatusOr<std::unique_ptr<ArenaBacking>> backing =
      cuda::CreateDeviceBacking(options.ordinal, arena_bytes);
  if (!backing.ok()) return backing.status();
  ASSIGN_OR_RETURN(device->arena_,
                   Arena::Create({.limit_bytes = arena_bytes, .extent_bytes = int64_t{32} << 20},
                                 &device->budget_, *std::move(backing)));
  if (resident_limit > 0) {
    device->copy_limit_ = std::make_unique<SlabLimit>(device->arena_.get(), resident_limit,
                                                      arena_bytes / kSpareShare);
  }
  device->blocks_.SetArena(device->arena_.get());
  ASSIGN_OR_RETURN(device->probe_, cuda::Stream::Create());
  for (const JobKind kind : kJobKinds) {
    for (int i = 0; i < shares.slots_of_kind; ++i) {
      absl::StatusOr<std::unique_ptr<StreamSlot>> slot =
          StreamSlot::Create(&device->budget_, host_budget, shares.wave_bytes,
                             /*urgent=*/kind == JobKind::kStep);
      if (!slot.ok()) return slot.status();
      device->slots_.push_back(*std::move(slot));
      const MutexLock lock(device->mutex_);
      device->Idle(kind).push_back(device->slots_.back().get());
    }
  }
  device->info_.name = absl::StrCat("cuda:", options.ordinal);
  device->gpu_.name = device->info_.name;
  device->gpu_.ordinal = options.ordinal;
  device->info_.description =
      absl::StrCat(properties.name, ", ", properties.multiProcessorCount, " SMs, compute ",
                   properties.major, ".", properties.minor, ", ", total >> 20, " MiB");
  device->info_.uuid = UuidName(properties.uuid);
  device->info_.thread_count = threads;
  device->info_.simd_target = SimdTargetName();
  device->fetcher_ =
      std::make_unique<cuda::RowFetcher>(device->gpu_, &device->budget_, host_budget);
  device->shared_ = std::make_unique<cuda::SharedHeap>(device.get(), device->gpu_, &device->budget_,
                                                       &device->workers_);
  device->info_.mps = cuda::SharedByMps(options.ordinal);
  device->finisher_ = std::thread([raw = device.get()] { raw->Finish(); });
  return device;
}

void CudaDevice::StartWaiting() {
  for (const JobKind kind : kJobKinds) {
    for (;;) {
      std::optional<JobBatch> batch;
      StreamSlot* slot = nullptr;
      {
        const MutexLock lock(mutex_);
        if (Idle(kind).empty()) break;
        batch = waiting_.Take(kind);
        if (!batch) break;
        slot = Idle(kind).back();
        Idle(kind).pop_back();
      }
      Start(*std::move(batch), kind, slot);
    }
  }
}

void CudaDevice::Start(JobBatch batch, JobKind kind, StreamSlot* slot) {
  Running running{std::move(batch), kind, slot, {}, nullptr, absl::OkStatus()};
  running.batch.Begin();
  Job& job = running.batch.job();
  for (const JobItem& item : job.items) {
    running.uses.push_back(static_cast<CudaSequence&>(*item.sequence).Use());
  }
  // If the job is cancelled or late already, items that only attend are not begun.
  if (job.cancel != nullptr) {
    if (const absl::Status status = job.cancel->Check(); !status.ok()) {
      for (JobItem& item : job.items) {
        if (item.attend.has_value() && !item.append.has_value()) item.status = status;
      }
    }
  }
  running.run = std::make_unique<JobRun>(&job, slot, gpu_);
  *slot->cancel() = 0;
  // If the caller finds no place among the workers, one of them runs this.
  workers_.execute([&] {
    const CurrentDevice current(ordinal_);
    running.status = current.status();
    if (running.status.ok()) running.status = running.run->Enqueue();
  });
  {
    const MutexLock lock(mutex_);
    started_.push_back(std::move(running));
  }
  changed_.NotifyOne();
}

void CudaDevice::Finish() {
  using Clock = std::chrono::steady_clock;
  // While one job runs, poll busily at first: the work of a decode step takes less time than a
  // thread takes to wake. While several run, the GPU stays busy when one ends, so a nap only delays
  // the answer, and leaves a core to the clients.
  constexpr auto kBusy = std::chrono::milliseconds(2);
  constexpr auto kNap = std::chrono::microseconds(10);
  constexpr auto kNapOfSeveral = std::chrono::microseconds(40);
  const CurrentDevice current(ordinal_);
  cuda::LetSleepsBeShort();
  std::vector<Running> running;
  Clock::time_point changed;
  for (;;) {
    {
      const MutexLock lock(mutex_);
      while (!stopping_ && running.empty() && started_.empty()) changed_.Wait(mutex_);
      if (running.empty() && started_.empty()) return;
      if (!started_.empty()) changed = Clock::now();
      std::move(started_.begin(), started_.end(), std::back_inserter(running));
      started_.clear();
    }
    const auto done = std::find_if(running.begin(), running.end(), [](Running& one) {
      const cudaError_t error = cudaStreamQuery(one.slot->stream());
      if (error == cudaErrorNotReady) {
        one.run->Cancelled();
        return false;
      }
      if (one.status.ok()) one.status = cuda::ToStatus(error, "an attend on the GPU");
      return true;
    });
    if (done != running.end()) {
      Running ended = std::move(*done);
      running.erase(done);
      End(std::move(ended));
      changed = Clock::now();
    } else if (running.size() > 1) {
      std::this_thread::sleep_for(kNapOfSeveral);
    } else if (Clock::now() - changed > kBusy) {
      std::this_thread::sleep_for(kNap);
    }
  }
}

void CudaDevice::End(Running running) {
  Job& job = running.batch.job();
  if (running.status.ok()) {
    running.run->Collect();
  } else {
    for (JobItem& item : job.items) item.status.Update(running.status);
  }
  if (*running.slot->cancel() != 0) {
    const absl::Status status = job.cancel->Check();
    for (JobItem& item : job.items) {
      if (item.attend.has_value()) item.status.Update(status);
    }
  }
  for (const JobItem& item : job.items) {
    static_cast<CudaSequence&>(*item.sequence)
        .CountMoved(item.result.moved_row_count * job.model->spec().row_bytes());
  }
  const bool reserved = running.run->reserved();
  running.run.reset();
  running.uses.clear();
  std::vector<QueuedJob> parts = running.batch.Split();
  {
    const MutexLock lock(mutex_);
    Idle(running.kind).push_back(running.slot);
    // Nothing was begun, for lack of memory. Each job alone may find enough.
    if (parts.size() > 1 && !reserved && absl::IsResourceExhausted(running.status)) {
      for (QueuedJob& part : parts) {
        part.job->batch_item_count = 0;
        for (JobItem& item : part.job->items) {
          item.status = absl::OkStatus();
          item.result = {};
        }
      }
      waiting_.PutBack(std::exchange(parts, {}));
    }
  }
  StartWaiting();
  for (QueuedJob& part : parts) {
    queue_waits_.Note(*part.job);
    part.done(std::move(part.job));
  }
}

}  // namespace

std::vector<CudaDeviceInfo> ListCudaDevices() {
  std::vector<CudaDeviceInfo> devices;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  cudaGetLastError();
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) {
      cudaGetLastError();
      continue;
    }
    devices.push_back({i, properties.name, UuidName(properties.uuid),
                       static_cast<int64_t>(properties.totalGlobalMem)});
  }
  return devices;
}

absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(const CudaDeviceOptions& options,
                                                         MemoryBudget* host_budget) {
  return CudaDevice::Create(options, host_budget);
}

}  // namespace spillway

#include "bench/gpu/gpu_fixture.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <future>
#include <utility>

#include "gpu/cuda/error.h"
#include "gpu/device/cuda_device.h"
#include "host/base/status_macros.h"

namespace spillway::bench {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;
constexpr int64_t kArenaChunkBytes = kGiB / 4;
constexpr int64_t kFlushBytes = kGiB / 4;  // several times the size of the L2 cache

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace

GpuFixture::GpuFixture(const ModelSpec& spec, int64_t token_max)
    : spec_(spec),
      budget_(token_max * spec.kv_head_count * spec.row_bytes() + 4 * kGiB),
      flush_budget_(kFlushBytes) {}

GpuFixture::~GpuFixture() {
  rows_.reset();
  sequence_.reset();
  model_.reset();
  pool_.reset();
  arena_.reset();
}

absl::StatusOr<std::unique_ptr<GpuFixture>> GpuFixture::Create(const ModelSpec& spec,
                                                               int64_t token_max) {
  std::unique_ptr<GpuFixture> fixture(new GpuFixture(spec, token_max));
  RETURN_IF_ERROR(fixture->Initialize());
  return fixture;
}

absl::Status GpuFixture::Initialize() {
  ASSIGN_OR_RETURN(device_, CreateCudaDevice({}, &budget_));
  Arena::ExtentObserver observer;
  observer.committed = [this](std::span<std::byte> extent) {
    const Stopwatch watch;
    absl::Status status = device_->RegisterMemory(extent);
    pin_seconds_ += watch.seconds();
    return status;
  };
  observer.released = [this](std::span<std::byte> extent) { device_->UnregisterMemory(extent); };
  ArenaOptions options;
  options.limit_bytes = budget_.limit_bytes() - kGiB;
  options.extent_bytes = kArenaChunkBytes;
  ASSIGN_OR_RETURN(arena_, Arena::Create(options, &budget_, observer));
  pool_ = std::make_unique<PagePool>(arena_.get(), kPageTokenCount * spec_.row_bytes());
  ASSIGN_OR_RETURN(model_, device_->CreateModel(spec_, {}));
  ASSIGN_OR_RETURN(sequence_, device_->CreateSequence(*model_));
  rows_ = std::make_unique<LayerRows>(pool_.get(), spec_);
  ASSIGN_OR_RETURN(flush_, cuda::DeviceBuffer::Create(kFlushBytes, &flush_budget_, "flush"));
  return absl::OkStatus();
}

absl::Status GpuFixture::PrepareAppend(int64_t count) {
  const int64_t start = rows_->token_count();
  RETURN_IF_ERROR(rows_->PrepareAppend(count));
  return device_->PrepareAppend(*model_, *sequence_, 0, start, count);
}

absl::StatusOr<GpuFixture::Appended> GpuFixture::Append(const std::byte* k, const std::byte* v,
                                                        int64_t count) {
  const Stopwatch watch;
  const double pin_seconds = pin_seconds_;
  const int64_t start = rows_->token_count();
  RETURN_IF_ERROR(PrepareAppend(count));
  JobItem item;
  item.append = AppendWork::Dense(rows_.get(), start, count, k, v);
  const auto job = Run(std::move(item), /*trace=*/false);
  if (!job->items[0].status.ok()) return job->items[0].status;
  return Appended{watch.seconds(), job->device_time_us * 1e-6, pin_seconds_ - pin_seconds};
}

absl::StatusOr<GpuFixture::Attended> GpuFixture::Attend(const AttendRequest& request, Mode mode) {
  JobItem item;
  if (request.k != nullptr) {
    RETURN_IF_ERROR(PrepareAppend(1));
    item.append = AppendWork::Dense(rows_.get(), rows_->token_count(), 1, request.k, request.v);
  }
  AttendQuery& attend = item.attend.emplace();
  attend.rows = rows_.get();
  attend.policy = request.policy;
  attend.q = reinterpret_cast<const std::byte*>(request.q.data());
  attend.query_count = 1;
  attend.visible = {request.visible};
  attend.select_only = mode == Mode::kSelect;
  const auto job = Run(std::move(item), mode == Mode::kTrace);
  if (!job->items[0].status.ok()) return job->items[0].status;
  return Attended{std::move(job->items[0].result), job->device_time_us, std::move(job->stages)};
}

absl::Status GpuFixture::FlushCaches() {
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaMemset(flush_.data(), 1, static_cast<size_t>(flush_.bytes())));
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaDeviceSynchronize());
  return absl::OkStatus();
}

std::unique_ptr<Job> GpuFixture::Run(JobItem item, bool trace) {
  item.sequence = sequence_.get();
  auto job = std::make_unique<Job>();
  job->model = model_.get();
  job->trace = trace;
  job->items.push_back(std::move(item));
  std::promise<std::unique_ptr<Job>> done;
  device_->Submit(std::move(job),
                  [&done](std::unique_ptr<Job> finished) { done.set_value(std::move(finished)); });
  return done.get_future().get();
}

}  // namespace spillway::bench

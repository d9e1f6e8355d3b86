#include "host/cpu/cpu_device.h"

#include <tbb/global_control.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "host/base/elements.h"
#include "host/base/parallel.h"
#include "host/cpu/attend_context.h"
#include "host/cpu/cpu_state.h"
#include "host/cpu/kernels.h"
#include "host/cpu/stage_clock.h"
#include "host/cpu/worker_pinning.h"
#include "host/cpu/workspace.h"
#include "host/device/append_rows.h"
#include "host/device/job_loops.h"
#include "host/device/job_queue.h"
#include "host/device/job_work.h"
#include "host/device/queue_waits.h"
#include "host/device/results.h"
#include "host/device/short_jobs.h"
#include "host/device/turns.h"

namespace spillway {
namespace {

class CpuDevice final : public Device {
 public:
  CpuDevice(const CpuDeviceOptions& options, Arena* arena, MemoryBudget* budget)
      : arena_(arena),
        workspaces_(budget),
        thread_count_(options.thread_count > 0 ? options.thread_count
                                               : tbb::this_task_arena::max_concurrency()),
        // oneTBB counts the caller's thread in this limit, whether or not it takes part.
        allowed_(tbb::global_control::max_allowed_parallelism, thread_count_ + 1),
        workers_(thread_count_ + kCallerCount, /*reserved_for_masters=*/kCallerCount) {
    workers_.initialize();
    for (int i = 0; i < kTurnClassCount; ++i) turns_.emplace_back(thread_count_);
    info_.name = "cpu:0";
    info_.thread_count = thread_count_;
    info_.simd_target = SimdTargetName();
    info_.description = absl::StrCat("CPU, ", info_.thread_count, " threads, ", info_.simd_target);
  }

  const DeviceInfo& info() const override { return info_; }
  const QueueWaits* queue_waits() const override { return &queue_waits_; }

  // The CPU reads host memory as it is.
  absl::Status RegisterMemory(std::span<std::byte>) override { return absl::OkStatus(); }
  void UnregisterMemory(std::span<std::byte>) override {}

  absl::StatusOr<std::unique_ptr<DeviceModel>> CreateModel(const ModelSpec& spec,
                                                           std::span<const std::byte> safetensors,
                                                           const CancelToken* cancel) override {
    // A task arena of the call's own: it has a slot for this thread, whatever other threads
    // compute, and workers prefer jobs.
    tbb::task_arena arena(thread_count_, /*reserved_for_masters=*/1,
                          tbb::task_arena::priority::low);
    return arena.execute([&] { return CpuModel::Create(spec, arena_, safetensors, cancel); });
  }

  absl::StatusOr<std::unique_ptr<DeviceSequence>> CreateSequence(DeviceModel& model) override {
    return std::make_unique<CpuSequence>(static_cast<CpuModel&>(model));
  }

  absl::StatusOr<std::unique_ptr<DeviceSequence>> ForkSequence(DeviceModel&, DeviceSequence& source,
                                                               int64_t token_count) override {
    return std::make_unique<CpuSequence>(static_cast<CpuSequence&>(source), token_count);
  }

  void TruncateSequence(DeviceModel&, DeviceSequence& sequence, int64_t token_count) override {
    static_cast<CpuSequence&>(sequence).Truncate(token_count);
  }

  absl::Status PrepareAppend(DeviceModel&, DeviceSequence& sequence, int layer, int64_t start,
                             int64_t count) override {
    return static_cast<CpuSequence&>(sequence).PrepareAppend(layer, start, count);
  }

  int64_t WeightBytes(const ModelSpec& spec) const override { return CpuModel::BytesOf(spec); }

  int64_t IndexBytesPerToken(const ModelSpec& spec) const override {
    return spec.kv_head_count * ((IndexPageBytes(spec) + kPageTokenCount - 1) / kPageTokenCount);
  }

  // By size, as Submit() does.
  void Fetch(const FetchWork& work, FetchDone done) override {
    const int64_t bytes = work.row_count() * work.rows.row_bytes();
    if (bytes <= kSerialBytes) {
      const SerialScope serial;
      return done(FetchRows(work));
    }
    if (bytes <= kMomentBytes) return done(workers_.execute([&] { return FetchRows(work); }));
    workers_.enqueue([&work, done = std::move(done)] { done(FetchRows(work)); });
  }

  // Serves small jobs, and jobs that the caller waits for, before it returns, except inside a pause
  // of another job. The smallest run in the caller's thread alone: waking a worker and waiting for
  // its answer would cost more.
  void Submit(std::unique_ptr<Job> job, Completion done) override {
    const Clock::time_point submitted = Clock::now();
    const int64_t bytes = RowBytes(*job);
    if (!ShortJobs::Paused() && ((bytes <= kMomentBytes && !Rebuilds(*job)) || job->waited_for)) {
      {
        std::optional<Turn> turn;
        if (KindOf(*job) == JobKind::kStep) turn.emplace(TurnsOf(bytes), job->owner);
        const auto run = [&] {
          const ShortJobs::CallersThread callers;
          Run(*job, submitted);
        };
        if (bytes <= kSerialBytes) {
          const SerialScope serial;
          run();
        } else {
          workers_.execute(run);
        }
      }
      return done(std::move(job));
    }
    const int64_t owner = job->owner;
    const int64_t work = Work(*job);
    short_jobs_->Push(
        {owner, work,
         [this, submitted, job = std::make_shared<std::unique_ptr<Job>>(std::move(job)),
          done = std::move(done)] {
           Run(**job, submitted);
           done(std::move(*job));
         }});
    // If another worker has taken the job, this task finds nothing to do, and may run after the
    // device is destroyed. So it shares ownership of short_jobs_.
    workers_.enqueue([short_jobs = short_jobs_] { short_jobs->RunNext(); });
  }

 private:
  using Clock = StageClock::Clock;

  // Callers that can serve their own jobs beside the workers. Without a slot in the arena, a caller
  // would wait for the end of a long job.
  static constexpr int kCallerCount = 16;
  // Bytes of rows that take about 50 us, and about 500 us.
  static constexpr int64_t kSerialBytes = int64_t{1} << 20;
  static constexpr int64_t kMomentBytes = int64_t{16} << 20;
  // Size classes of turns: up to kMomentBytes, then each up to four times the one before; the last
  // has no limit.
  static constexpr int kTurnClassCount = 10;

  // Whether the job makes codes of rows that outlived an earlier process. There are many such jobs,
  // one after the other, and no caller waits for them here.
  static bool Rebuilds(const Job& job) {
    return job.items.front().append && job.items.front().append->rows_present;
  }

  int64_t Work(const Job& job) const {
    return WorkOf(job, IndexBytesPerToken(static_cast<const CpuModel&>(*job.model).spec()));
  }

  // Jobs that differ in size by a factor of four have separate turns. So no job waits for the end
  // of a much longer one.
  Turns& TurnsOf(int64_t bytes) {
    size_t at = 0;
    for (; bytes > kMomentBytes && at + 1 < turns_.size(); bytes /= ShortJobs::kShare) ++at;
    return turns_[at];
  }

  void Run(Job& job, Clock::time_point submitted) {
    using Microseconds = std::chrono::duration<double, std::micro>;
    const Clock::time_point start = Clock::now();
    job.queue_time_us = Microseconds(start - submitted).count();
    queue_waits_.Note(job);
    StageClock clock;
    clock.Begin(start);
    // A thread that waits for its own job runs no tasks of other jobs.
    Isolated([&] {
      auto& model = static_cast<CpuModel&>(*job.model);
      const JobLoops loops(short_jobs_.get(), Work(job));
      bool appends = false;
      for (JobItem& item : job.items) {
        if (!item.append.has_value()) continue;
        Append(model, job.layer, item, loops);
        appends = true;
      }
      if (appends) clock.End(JobStage::kAppend);
      Attend(model, job, loops, clock);
    });
    job.device_time_us = Microseconds(Clock::now() - start).count();
    job.stages = clock.times();
  }

  static void Append(const CpuModel& model, int layer, JobItem& item, const JobLoops& loops) {
    const AppendWork& work = *item.append;
    item.status = AppendRows(model.spec(), layer, work);
    if (!item.status.ok()) return;
    auto& sequence = static_cast<CpuSequence&>(*item.sequence);
    if (sequence.layers.empty()) return;
    IndexAppended(model, layer, *work.rows, sequence.layers[layer], loops);
  }

  // Every sparse (item, query, group) of the job is one unit of one parallel loop. Dense attends
  // run before it, one after the other; each is parallel in itself.
  void Attend(const CpuModel& model, Job& job, const JobLoops& loops, StageClock& clock) {
    struct Unit {
      size_t item;
      int64_t query;
      int group_index;
    };
    std::vector<AttendContext> contexts(job.items.size());
    std::vector<Unit> units;
    bool dense = false;
    for (size_t i = 0; i < job.items.size(); ++i) {
      JobItem& item = job.items[i];
      if (!item.attend.has_value() || !item.status.ok()) continue;
      item.result = AllocateResult(model.spec(), *item.attend);
      AttendContext& c = contexts[i];
      auto& sequence = static_cast<CpuSequence&>(*item.sequence);
      c.shapes = &model.spec();
      c.model = &model;
      c.index = sequence.layers.empty() ? nullptr : &sequence.layers[job.layer];
      c.layer = job.layer;
      c.attend = &*item.attend;
      c.result = &item.result;
      c.cancel = job.cancel.get();
      c.workspaces = &workspaces_;
      c.loops = loops;
      CutQueries(
          model.spec(), *item.attend, job.layer,
          [&](int64_t begin, int64_t end) {
            if (item.status.ok()) item.status = AttendDense(c, begin, end);
            dense = true;
          },
          [&](int64_t t) {
            for (int g = 0; g < model.spec().group_count(); ++g) units.push_back({i, t, g});
          });
    }
    if (dense) clock.End(JobStage::kDense);
    // Only one unit is timed, one of the longest: each timed unit reads the clock a dozen times.
    const auto visible = [&](const Unit& unit) {
      return contexts[unit.item].attend->visible[unit.query];
    };
    const int64_t timed =
        std::max_element(units.begin(), units.end(),
                         [&](const Unit& a, const Unit& b) { return visible(a) < visible(b); }) -
        units.begin();
    std::vector<absl::Status> statuses(units.size());
    loops.Run(static_cast<int64_t>(units.size()), [&](int64_t u) {
      if (!job.items[units[u].item].status.ok()) return;
      statuses[u] = AttendSparse(contexts[units[u].item], units[u].query, units[u].group_index,
                                 u == timed ? &clock : nullptr);
    });
    for (size_t u = 0; u < units.size(); ++u) job.items[units[u].item].status.Update(statuses[u]);
    for (JobItem& item : job.items) {
      if (item.attend.has_value() && item.status.ok()) {
        item.status = CheckOutput(model.spec(), job.layer, item.result);
      }
    }
  }

  Arena* const arena_;
  WorkspacePool workspaces_;
  const int thread_count_;
  tbb::global_control allowed_;
  tbb::task_arena workers_;
  WorkerPinning pinning_{workers_, thread_count_};
  // Shared with tasks that may run after the device is destroyed.
  const std::shared_ptr<ShortJobs> short_jobs_ = std::make_shared<ShortJobs>();
  // Turns of callers that serve their own decode steps, by size class. As many run at once as there
  // are threads. If more ran, the operating system would serve some callers more often than others.
  std::deque<Turns> turns_;
  DeviceInfo info_;
  QueueWaits queue_waits_;
};

}  // namespace

std::unique_ptr<Device> CreateCpuDevice(const CpuDeviceOptions& options, Arena* arena,
                                        MemoryBudget* budget) {
  return std::make_unique<CpuDevice>(options, arena, budget);
}

}  // namespace spillway

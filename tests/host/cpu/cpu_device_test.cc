// The order in which the CPU device serves jobs: short jobs go first, and long jobs still make
// progress.
#include "host/cpu/cpu_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "host/base/mutex.h"
#include "host/device/queue_waits.h"
#include "tests/conformance/device_bench.h"
#include "tests/reference/trace.h"

namespace spillway {
namespace {

using ::testing::ElementsAre;

// Calls f when it is checked for the first time, which is when its job begins.
class AtBegin final : public CancelToken {
 public:
  explicit AtBegin(std::function<void()> f) : f_(std::move(f)) {}
  bool cancelled() const override {
    if (!begun_.exchange(true)) f_();
    return CancelToken::cancelled();
  }

 private:
  const std::function<void()> f_;
  mutable std::atomic<bool> begun_ = false;
};

class CpuOrder : public ::testing::TestWithParam<int> {
 protected:
  static constexpr int64_t kTokens = 4096;
  // A step's attend reads rows of 32 MiB: more than a caller's thread serves on its own.
  static constexpr int64_t kStepQueries = 16;
  static constexpr int64_t kGiantQueries = 64;
  static constexpr int64_t kGiant = 1, kSmall = 2;  // owners

  explicit CpuOrder(int thread_count = GetParam())
      : spec_(MakeSpec(2, 4, 64, DType::kBF16)),
        bench_(Cpu(), spec_, thread_count),
        context_(reference::TraceContext(spec_, kTokens, 7)),
        step_q_(reference::TraceQueries(context_, kStepQueries, 8, 1.5)),
        giant_q_(reference::TraceQueries(context_, kGiantQueries, 9, 1.5)),
        sequence_(bench_) {
    EXPECT_TRUE(sequence_.Append(context_, 0, kTokens).ok());
  }

  static DeviceFactory Cpu() {
    return {"cpu", [](int thread_count, Arena* arena, MemoryBudget* budget) {
              return CreateCpuDevice({thread_count}, arena, budget);
            }};
  }

  std::unique_ptr<Job> NewJob(int64_t owner, JobItem item) {
    auto job = std::make_unique<Job>();
    job->model = &bench_.model();
    job->owner = owner;
    job->items.push_back(std::move(item));
    return job;
  }
  std::unique_ptr<Job> Step() {
    return NewJob(kSmall, sequence_.AttendItem(DefaultPolicy(spec_), step_q_, false));
  }
  std::unique_ptr<Job> Giant() {
    return NewJob(kGiant, sequence_.AttendItem(DefaultPolicy(spec_), giant_q_, false));
  }

  // Submits a job. When the job has ended, its name is added to ended().
  std::future<JobItem> Submit(std::unique_ptr<Job> job, const std::string& name) {
    auto promise = std::make_shared<std::promise<JobItem>>();
    bench_.device().Submit(std::move(job), [this, name, promise](std::unique_ptr<Job> done) {
      {
        const MutexLock lock(mutex_);
        ended_.push_back(name);
      }
      promise->set_value(std::move(done->items[0]));
    });
    return promise->get_future();
  }
  std::vector<std::string> ended() {
    const MutexLock lock(mutex_);
    return ended_;
  }

  const ModelSpec spec_;
  DeviceBench bench_;
  const reference::Context context_;
  const std::vector<float> step_q_;
  const std::vector<float> giant_q_;
  BenchSequence sequence_;

 private:
  Mutex mutex_;
  std::vector<std::string> ended_ ABSL_GUARDED_BY(mutex_);
};

class CpuOrderOfOneThread : public CpuOrder {
 protected:
  CpuOrderOfOneThread() : CpuOrder(1) {}
};

TEST_F(CpuOrderOfOneThread, AStepGoesBeforeAGiantThatHasBegun) {
  std::promise<void> begun, submitted;
  std::unique_ptr<Job> giant = Giant();
  giant->cancel = std::make_shared<AtBegin>([&] {
    begun.set_value();
    submitted.get_future().wait();
  });
  std::future<JobItem> long_result = Submit(std::move(giant), "giant");
  begun.get_future().wait();
  std::future<JobItem> result = Submit(Step(), "step");
  submitted.set_value();
  EXPECT_TRUE(result.get().status.ok());
  EXPECT_TRUE(long_result.get().status.ok());
  EXPECT_THAT(ended(), ElementsAre("step", "giant"));
}

TEST_F(CpuOrderOfOneThread, AGiantEndsAlthoughStepsNeverStop) {
  std::atomic<bool> stop = false;
  std::atomic<int> runners = 2;
  // Two steps are in the device at any moment: each submits the next when it ends.
  std::function<void()> step = [&] {
    bench_.device().Submit(Step(), [&](std::unique_ptr<Job> done) {
      EXPECT_TRUE(done->items[0].status.ok()) << done->items[0].status;
      stop ? void(--runners) : step();
    });
  };
  std::future<JobItem> giant = Submit(Giant(), "giant");
  step();
  step();
  EXPECT_TRUE(giant.get().status.ok());
  stop = true;
  while (runners > 0) std::this_thread::yield();
}

TEST_F(CpuOrderOfOneThread, JobsOfOneSizeStayInOrder) {
  std::promise<void> submitted;
  std::unique_ptr<Job> first = Giant();
  first->cancel = std::make_shared<AtBegin>([&] { submitted.get_future().wait(); });
  std::vector<std::future<JobItem>> results;
  results.push_back(Submit(std::move(first), "0"));
  for (const char* name : {"1", "2", "3"}) results.push_back(Submit(Giant(), name));
  submitted.set_value();
  for (std::future<JobItem>& result : results) EXPECT_TRUE(result.get().status.ok());
  EXPECT_THAT(ended(), ElementsAre("0", "1", "2", "3"));
}

TEST_F(CpuOrderOfOneThread, AStepThatIsCancelledEndsAloneAndFirst) {
  std::promise<void> submitted;
  std::unique_ptr<Job> giant = Giant();
  giant->cancel = std::make_shared<AtBegin>([&] { submitted.get_future().wait(); });
  std::future<JobItem> long_result = Submit(std::move(giant), "giant");
  std::unique_ptr<Job> job = Step();
  job->cancel = std::make_shared<CancelToken>();
  const std::shared_ptr<CancelToken> token = job->cancel;
  std::future<JobItem> step = Submit(std::move(job), "step");
  token->Cancel();
  submitted.set_value();
  EXPECT_EQ(step.get().status.code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(long_result.get().status.ok());
  EXPECT_THAT(ended(), ElementsAre("step", "giant"));
}

TEST_F(CpuOrderOfOneThread, ACallersStepDoesNotWaitForTheTurnOfAnothersGiant) {
  // A decode step of 16 sequences, each with 16 queries and all rows.
  std::vector<BenchSequence> forks;
  Policy all = DefaultPolicy(spec_);
  all.selector = Selector::kAll;
  auto giant = std::make_unique<Job>();
  giant->model = &bench_.model();
  giant->owner = kGiant;
  giant->waited_for = true;
  for (int i = 0; i < 16; ++i) {
    forks.push_back(sequence_.Fork(kTokens));
    giant->items.push_back(forks.back().AttendItem(all, step_q_, false));
  }
  std::promise<void> begun, step_ended;
  bool in_time = false;
  giant->cancel = std::make_shared<AtBegin>([&] {
    begun.set_value();
    in_time =
        step_ended.get_future().wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  });
  std::thread caller([&] { Submit(std::move(giant), "giant"); });
  begun.get_future().wait();
  std::unique_ptr<Job> step = Step();
  step->waited_for = true;
  EXPECT_TRUE(Submit(std::move(step), "step").get().status.ok());
  step_ended.set_value();
  caller.join();
  EXPECT_TRUE(in_time);
  EXPECT_THAT(ended(), ElementsAre("step", "giant"));
}

TEST_F(CpuOrderOfOneThread, AJobTellsItsStagesAndItsWait) {
  const auto run = [&](std::unique_ptr<Job> job) {
    std::unique_ptr<Job> done = bench_.Run(std::move(job));
    EXPECT_TRUE(done->items[0].status.ok()) << done->items[0].status;
    double sum = 0;
    std::vector<std::string> names;
    for (const StageTime& stage : done->stages) {
      EXPECT_GT(stage.us, 0);
      names.push_back(stage.name);
      sum += stage.us;
    }
    EXPECT_LE(sum, done->device_time_us);
    EXPECT_GT(done->queue_time_us, 0);
    return names;
  };
  EXPECT_THAT(run(Step()), ElementsAre("score", "cut", "sample", "fold"));
  Policy policy = DefaultPolicy(spec_);
  policy.selector = Selector::kAll;
  EXPECT_THAT(run(NewJob(kSmall, sequence_.AttendItem(policy, step_q_, false))),
              ElementsAre("dense"));
  EXPECT_THAT(run(Giant()), ElementsAre("dense"));
  const QueueWaits& waits = *bench_.device().queue_waits();
  const auto count = [&](JobKind kind) {
    const auto counts = waits.Of(kind).counts();
    return std::accumulate(counts.begin(), counts.end(), int64_t{0});
  };
  EXPECT_EQ(count(JobKind::kStep), 2);
  // The second is the append of the context.
  EXPECT_EQ(count(JobKind::kLong), 2);
}

TEST_F(CpuOrderOfOneThread, AJobThatWaitsSaysHowLong) {
  constexpr std::chrono::milliseconds kHeld(20);
  std::promise<void> begun, submitted;
  auto first = Step();
  first->cancel = std::make_shared<AtBegin>([&] {
    begun.set_value();
    submitted.get_future().wait();
    std::this_thread::sleep_for(kHeld);
  });
  std::future<JobItem> held = Submit(std::move(first), "held");
  begun.get_future().wait();
  std::promise<double> wait_us;
  bench_.device().Submit(
      Step(), [&](std::unique_ptr<Job> done) { wait_us.set_value(done->queue_time_us); });
  submitted.set_value();
  EXPECT_GE(wait_us.get_future().get(), 1e3 * static_cast<double>(kHeld.count()));
  EXPECT_TRUE(held.get().status.ok());
}

TEST_P(CpuOrder, ResultsAreThoseOfEachAlone) {
  const JobItem step_alone = Submit(Step(), "").get();
  const JobItem giant_alone = Submit(Giant(), "").get();
  ASSERT_TRUE(step_alone.status.ok());
  ASSERT_TRUE(giant_alone.status.ok());
  std::vector<std::future<JobItem>> giants;
  for (int i = 0; i < 2; ++i) giants.push_back(Submit(Giant(), ""));
  std::vector<std::thread> runners;
  for (int r = 0; r < 3; ++r) {
    runners.emplace_back([&, r] {
      for (int i = 0; i < 4; ++i) {
        std::unique_ptr<Job> job = Step();
        job->waited_for = r > 0;
        const JobItem step = Submit(std::move(job), "").get();
        EXPECT_TRUE(step.status.ok()) << step.status;
        EXPECT_EQ(step.result.out, step_alone.result.out) << "runner " << r << ", step " << i;
        EXPECT_EQ(step.result.lse, step_alone.result.lse) << "runner " << r << ", step " << i;
      }
    });
  }
  for (std::thread& runner : runners) runner.join();
  for (std::future<JobItem>& result : giants) {
    const JobItem giant = result.get();
    EXPECT_TRUE(giant.status.ok()) << giant.status;
    EXPECT_EQ(giant.result.out, giant_alone.result.out);
    EXPECT_EQ(giant.result.lse, giant_alone.result.lse);
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, CpuOrder, ::testing::Values(1, 3));

}  // namespace
}  // namespace spillway

// The order in which a device serves jobs that are submitted at the same time: no job starves, and
// a job that is served with others gives the same results as alone.
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>
#include <vector>

#include "tests/conformance/device_bench.h"
#include "tests/reference/trace.h"

namespace spillway {
namespace {

using reference::Context;

class Order : public ::testing::TestWithParam<DeviceFactory> {
 protected:
  static constexpr int64_t kTokens = 4096;

  Order()
      : spec_(MakeSpec(2, 4, 64, DType::kBF16)),
        bench_(GetParam(), spec_),
        context_(reference::TraceContext(spec_, kTokens + kSteps, 7)),
        q_(reference::TraceQueries(context_, 1, 8, 1.5)),
        long_q_(reference::TraceQueries(context_, kLongQueries, 9, 1.5)) {}

  // A sequence with the first tokens of the context.
  BenchSequence Filled() {
    BenchSequence sequence(bench_);
    EXPECT_TRUE(sequence.Append(context_, 0, kTokens).ok());
    return sequence;
  }

  // The context's first tokens again and again. A GPU attends to kTokens in the time that it takes
  // to submit that.
  Context LongContext() const {
    const int times = GetParam().name == "cpu" ? 1 : 16;
    Context context = context_;
    context.n = times * kTokens;
    for (auto [from, to] :
         {std::pair{&context_.k, &context.k}, std::pair{&context_.v, &context.v}}) {
      to->clear();
      const int64_t row = spec_.head_dim;
      for (int h = 0; h < spec_.kv_head_count; ++h) {
        const auto begin = from->begin() + h * context_.n * row;
        for (int t = 0; t < times; ++t) to->insert(to->end(), begin, begin + kTokens * row);
      }
    }
    return context;
  }

  // Starts an exact attend of kLongQueries queries, thousands of times the work of a step.
  std::future<JobItem> StartLong(BenchSequence& sequence) {
    auto job = std::make_unique<Job>();
    job->model = &bench_.model();
    job->items.push_back(sequence.AttendItem(DefaultPolicy(spec_), long_q_, false));
    auto promise = std::make_shared<std::promise<JobItem>>();
    bench_.device().Submit(std::move(job), [promise](std::unique_ptr<Job> done) {
      promise->set_value(std::move(done->items[0]));
    });
    return promise->get_future();
  }

  static constexpr int kSteps = 12;
  static constexpr int64_t kLongQueries = 1024;
  const ModelSpec spec_;
  DeviceBench bench_;
  const Context context_;
  const std::vector<float> q_;
  const std::vector<float> long_q_;
};

bool IsReady(const std::future<JobItem>& result) {
  return result.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

TEST_P(Order, StepsDoNotWaitForLongJobs) {
  BenchSequence stepping = Filled();
  const Context context = LongContext();
  std::vector<BenchSequence> sequences;
  std::vector<std::future<JobItem>> results;
  for (int i = 0; i < 12; ++i) {
    EXPECT_TRUE(sequences.emplace_back(bench_).Append(context, 0, context.n).ok());
  }
  for (BenchSequence& sequence : sequences) results.push_back(StartLong(sequence));
  const JobItem step = stepping.Step(context_, DefaultPolicy(spec_), q_);
  EXPECT_TRUE(step.status.ok()) << step.status;
  EXPECT_FALSE(IsReady(results.back())) << "twelve long jobs ended before one step";
  for (std::future<JobItem>& result : results) {
    const absl::Status status = result.get().status;
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST_P(Order, ALongJobEndsAlthoughStepsNeverStop) {
  std::atomic<bool> stop = false;
  std::vector<std::thread> runners;
  for (int i = 0; i < 4; ++i) {
    runners.emplace_back([&] {
      BenchSequence sequence = Filled();
      while (!stop) {
        const JobItem step = sequence.Step(context_, DefaultPolicy(spec_), q_);
        EXPECT_TRUE(step.status.ok()) << step.status;
        sequence.Truncate(kTokens);
      }
    });
  }
  BenchSequence sequence = Filled();
  EXPECT_TRUE(StartLong(sequence).get().status.ok());
  stop = true;
  for (std::thread& runner : runners) runner.join();
}

TEST_P(Order, StepsOfManyAtOnceHaveTheBitsOfEachAlone) {
  const Policy policy = DefaultPolicy(spec_);
  constexpr int kRunners = 8;
  // Each runner decodes with its own queries.
  std::vector<std::vector<float>> queries;
  for (uint64_t r = 0; r < kRunners; ++r) {
    queries.push_back(reference::TraceQueries(context_, 1, 100 + r, 1.5));
  }
  const auto decode = [&](int r, std::vector<AttendResult>& results) {
    BenchSequence sequence = Filled();
    for (int i = 0; i < kSteps; ++i) {
      JobItem step = sequence.Step(context_, policy, queries[r]);
      EXPECT_TRUE(step.status.ok()) << step.status;
      results.push_back(std::move(step.result));
    }
  };
  std::vector<std::vector<AttendResult>> alone(kRunners), together(kRunners);
  for (int r = 0; r < kRunners; ++r) decode(r, alone[r]);
  std::vector<std::thread> runners;
  for (int r = 0; r < kRunners; ++r) runners.emplace_back([&, r] { decode(r, together[r]); });
  for (std::thread& runner : runners) runner.join();
  for (int r = 0; r < kRunners; ++r) {
    for (int i = 0; i < kSteps; ++i) {
      EXPECT_EQ(alone[r][i].out, together[r][i].out) << "runner " << r << ", step " << i;
      EXPECT_EQ(alone[r][i].lse, together[r][i].lse) << "runner " << r << ", step " << i;
    }
  }
}

TEST_P(Order, ExactAttendsBesideLargerOnesHaveTheBitsOfEachAlone) {
  Policy policy = DefaultPolicy(spec_);
  policy.selector = Selector::kAll;
  const std::vector<float> several = reference::TraceQueries(context_, 8, 10, 1.5);
  std::vector<BenchSequence> sequences;
  for (int i = 0; i < 4; ++i) sequences.push_back(Filled());
  // In turns, so that each kind has one of the other before and after it.
  const auto item = [&](size_t i) {
    return sequences[i].AttendItem(policy, i % 2 == 0 ? q_ : several, /*select_only=*/false);
  };
  auto job = std::make_unique<Job>();
  job->model = &bench_.model();
  for (size_t i = 0; i < sequences.size(); ++i) job->items.push_back(item(i));
  const std::unique_ptr<Job> together = bench_.Run(std::move(job));
  for (size_t i = 0; i < sequences.size(); ++i) {
    const JobItem alone = sequences[i].RunOne(item(i));
    ASSERT_TRUE(alone.status.ok()) << alone.status;
    ASSERT_TRUE(together->items[i].status.ok()) << together->items[i].status;
    EXPECT_EQ(alone.result.out, together->items[i].result.out) << "item " << i;
    EXPECT_EQ(alone.result.lse, together->items[i].result.lse) << "item " << i;
  }
}

TEST_P(Order, AnErrorOfOneLeavesTheOthersAlone) {
  constexpr int kRunners = 6;
  std::vector<std::thread> runners;
  for (int r = 0; r < kRunners; ++r) {
    runners.emplace_back([&, r] {
      BenchSequence sequence = Filled();
      std::vector<float> q = q_;
      // The logits of this runner are not finite.
      if (r == 0) std::fill(q.begin(), q.end(), 3e38f);
      for (int i = 0; i < kSteps; ++i) {
        const JobItem step = sequence.Step(context_, DefaultPolicy(spec_), q);
        EXPECT_EQ(step.status.ok(), r != 0) << "runner " << r << ": " << step.status;
      }
    });
  }
  for (std::thread& runner : runners) runner.join();
}

INSTANTIATE_TEST_SUITE_P(Devices, Order, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace spillway

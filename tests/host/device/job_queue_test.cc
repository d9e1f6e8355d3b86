#include "host/device/job_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "host/device/queue_waits.h"

namespace spillway {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class Model final : public DeviceModel {
 public:
  const ModelSpec& spec() const override { return spec_; }
  int64_t bytes() const override { return 0; }

 private:
  ModelSpec spec_;
};

class JobQueueTest : public ::testing::Test {
 protected:
  // A job whose items are identified by their visible counts.
  std::unique_ptr<Job> Step(std::vector<int64_t> names, int layer = 0,
                            DeviceModel* model = nullptr) {
    auto job = std::make_unique<Job>();
    job->model = model != nullptr ? model : &model_;
    job->layer = layer;
    for (const int64_t name : names) {
      JobItem& item = job->items.emplace_back();
      item.append.emplace().count = 1;
      item.attend.emplace().query_count = 1;
      item.attend->visible = {name};
    }
    return job;
  }
  std::unique_ptr<Job> Append(int64_t count) {
    auto job = std::make_unique<Job>();
    job->model = &model_;
    job->items.emplace_back().append.emplace().count = count;
    return job;
  }
  void Push(std::unique_ptr<Job> job) {
    queue_.Push({std::move(job), [this](std::unique_ptr<Job> done) {
                   for (const JobItem& item : done->items) {
                     answered_.push_back(item.attend ? item.attend->visible[0] : 0);
                   }
                 }});
  }

  static std::vector<int64_t> Names(Job& job) {
    std::vector<int64_t> names;
    for (const JobItem& item : job.items) names.push_back(item.attend->visible[0]);
    return names;
  }
  // The names of the next batch of steps; empty if there is none.
  std::vector<int64_t> TakeStep() {
    std::optional<JobBatch> batch = queue_.Take(JobKind::kStep);
    return batch ? Names(batch->job()) : std::vector<int64_t>();
  }

  Model model_, other_model_;
  JobQueue queue_;
  std::vector<int64_t> answered_;
};

TEST_F(JobQueueTest, ADecodeStepIsAStepAndTheRestIsLong) {
  EXPECT_EQ(KindOf(*Step({1, 2})), JobKind::kStep);
  auto attend = Step({1});
  attend->items[0].append.reset();
  EXPECT_EQ(KindOf(*attend), JobKind::kStep);
  attend->items[0].attend->query_count = 16;
  EXPECT_EQ(KindOf(*attend), JobKind::kStep);
  attend->items[0].attend->query_count = 17;
  EXPECT_EQ(KindOf(*attend), JobKind::kLong);
  auto select = Step({1});
  select->items[0].attend->select_only = true;
  EXPECT_EQ(KindOf(*select), JobKind::kLong);
  auto prompt = Step({1, 2});
  prompt->items[1].append->count = 2;
  EXPECT_EQ(KindOf(*prompt), JobKind::kLong);
  EXPECT_EQ(KindOf(*Append(1)), JobKind::kLong);
}

TEST_F(JobQueueTest, EveryKindComesInTheOrderOfArrival) {
  Push(Append(100));
  Push(Step({1}, /*layer=*/0));
  Push(Append(200));
  Push(Step({2}, /*layer=*/1));
  EXPECT_THAT(TakeStep(), ElementsAre(1));
  EXPECT_EQ(queue_.Take(JobKind::kLong)->job().items[0].append->count, 100);
  EXPECT_EQ(queue_.Take(JobKind::kLong)->job().items[0].append->count, 200);
  EXPECT_FALSE(queue_.Take(JobKind::kLong).has_value());
  EXPECT_FALSE(queue_.empty());
  EXPECT_THAT(TakeStep(), ElementsAre(2));
  EXPECT_THAT(TakeStep(), IsEmpty());
  EXPECT_TRUE(queue_.empty());
}

TEST_F(JobQueueTest, StepsOfOneLayerAreJoinedAndNobodyIsPassedForLong) {
  Push(Step({1}, 0));
  Push(Step({2}, 1));
  Push(Step({3, 4}, 0));
  Push(Step({5}, 0, &other_model_));
  Push(Step({6}, 1));
  EXPECT_THAT(TakeStep(), ElementsAre(1, 3, 4));
  // A later job does not overtake the first one.
  Push(Step({7}, 0));
  EXPECT_THAT(TakeStep(), ElementsAre(2, 6));
  EXPECT_THAT(TakeStep(), ElementsAre(5));
  EXPECT_THAT(TakeStep(), ElementsAre(7));
}

TEST_F(JobQueueTest, OwnersTakeTurns) {
  const auto push = [this](int64_t name, int64_t owner) {
    auto job = Step({name}, static_cast<int>(name));
    job->owner = owner;
    Push(std::move(job));
  };
  for (int64_t name = 1; name <= 4; ++name) push(name, 7);
  EXPECT_THAT(TakeStep(), ElementsAre(1));
  // An owner with few jobs does not wait for all jobs of another owner.
  push(11, 8);
  push(12, 8);
  push(21, 9);
  for (const int64_t name : {11, 21, 2, 12, 3, 4}) EXPECT_THAT(TakeStep(), ElementsAre(name));
  EXPECT_THAT(TakeStep(), IsEmpty());
}

TEST_F(JobQueueTest, LongJobsAreNeverJoined) {
  Push(Append(1));
  Push(Append(2));
  EXPECT_EQ(queue_.Take(JobKind::kLong)->part_count(), 1u);
  EXPECT_EQ(queue_.Take(JobKind::kLong)->part_count(), 1u);
}

TEST_F(JobQueueTest, ABatchHas64ItemsAtMostAndAJobIsNeverCut) {
  std::vector<int64_t> many(40, 1);
  Push(Step(many));
  Push(Step(std::vector<int64_t>(30, 2)));
  Push(Step(std::vector<int64_t>(24, 3)));
  EXPECT_EQ(TakeStep().size(), 64u);  // the first and the third
  EXPECT_EQ(TakeStep().size(), 30u);
  Push(Step(std::vector<int64_t>(100, 4)));
  Push(Step({5}));
  EXPECT_EQ(TakeStep().size(), 100u);
  EXPECT_THAT(TakeStep(), ElementsAre(5));
}

TEST_F(JobQueueTest, PartsGetTheirItemsAndTheirOwnErrorsBack) {
  Push(Step({1}));
  Push(Step({2, 3}));
  std::optional<JobBatch> batch = queue_.Take(JobKind::kStep);
  ASSERT_EQ(batch->part_count(), 2u);
  Job& job = batch->job();
  job.device_time_us = 12.5;
  job.stages = {{"score", 7}};
  for (size_t i = 0; i < 3; ++i) job.items[i].result.lse = {static_cast<float>(10 * (i + 1))};
  job.items[1].status = absl::OutOfRangeError("token 7");
  std::vector<QueuedJob> parts = batch->Split();
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_THAT(Names(*parts[0].job), ElementsAre(1));
  EXPECT_THAT(Names(*parts[1].job), ElementsAre(2, 3));
  EXPECT_THAT(parts[0].job->items[0].result.lse, ElementsAre(10));
  EXPECT_THAT(parts[1].job->items[1].result.lse, ElementsAre(30));
  EXPECT_TRUE(parts[0].job->items[0].status.ok());
  EXPECT_EQ(parts[1].job->items[0].status.message(), "token 7");
  EXPECT_TRUE(parts[1].job->items[1].status.ok());
  for (QueuedJob& part : parts) {
    EXPECT_EQ(part.job->device_time_us, 12.5);
    EXPECT_EQ(part.job->batch_item_count, 3);
    ASSERT_EQ(part.job->stages.size(), 1);
    EXPECT_EQ(part.job->stages[0].us, 7);
    part.done(std::move(part.job));
  }
  EXPECT_THAT(answered_, ElementsAre(1, 2, 3));
}

TEST_F(JobQueueTest, ABatchThatBeginsSaysHowLongEachPartHasWaited) {
  const auto now = std::chrono::steady_clock::now();
  const auto keep = [](std::unique_ptr<Job>) {};
  queue_.Push({Step({1}), keep, /*alone=*/false, now - std::chrono::seconds(7)});
  queue_.Push({Step({2}), keep, /*alone=*/false, now - std::chrono::seconds(3)});
  std::optional<JobBatch> batch = queue_.Take(JobKind::kStep);
  ASSERT_EQ(batch->part_count(), 2u);
  batch->Begin();
  const std::vector<QueuedJob> parts = batch->Split();
  EXPECT_GE(parts[0].job->queue_time_us, 7e6);
  EXPECT_GE(parts[1].job->queue_time_us, 3e6);
  EXPECT_LT(parts[1].job->queue_time_us, parts[0].job->queue_time_us);
}

TEST_F(JobQueueTest, WaitsAreCountedByWhatAJobIs) {
  QueueWaits waits;
  std::unique_ptr<Job> step = Step({1});
  step->queue_time_us = 250;
  waits.Note(*step);
  std::unique_ptr<Job> append = Append(100);
  append->queue_time_us = 3e6;
  waits.Note(*append);
  waits.Note(*append);
  EXPECT_EQ(waits.Of(JobKind::kStep).sum(), 250e-6);
  EXPECT_EQ(waits.Of(JobKind::kLong).sum(), 6);
}

TEST_F(JobQueueTest, WhatIsPutBackComesFirstAndAlone) {
  Push(Step({1}));
  Push(Step({2}));
  std::optional<JobBatch> batch = queue_.Take(JobKind::kStep);
  Push(Step({3}));
  queue_.PutBack(batch->Split());
  EXPECT_THAT(TakeStep(), ElementsAre(1));
  EXPECT_THAT(TakeStep(), ElementsAre(2));
  EXPECT_THAT(TakeStep(), ElementsAre(3));
}

TEST_F(JobQueueTest, ABatchIsCancelledWithItsLastPart) {
  std::vector<std::shared_ptr<CancelToken>> tokens;
  for (int64_t i = 1; i <= 2; ++i) {
    auto job = Step({i});
    tokens.push_back(job->cancel = std::make_shared<CancelToken>());
    Push(std::move(job));
  }
  std::optional<JobBatch> batch = queue_.Take(JobKind::kStep);
  ASSERT_EQ(batch->part_count(), 2u);
  tokens[0]->Cancel();
  EXPECT_TRUE(batch->job().cancel->Check().ok());
  tokens[1]->Cancel();
  EXPECT_TRUE(absl::IsCancelled(batch->job().cancel->Check()));
}

TEST_F(JobQueueTest, APartOfACancelledBatchHasItsOwnReason) {
  // Parts whose deadlines have passed do not join: on a slow machine it takes a longer one.
  for (auto time = std::chrono::milliseconds(20);; time *= 2) {
    const auto deadline = CancelToken::Clock::now() + time;
    for (int64_t i = 1; i <= 2; ++i) {
      auto job = Step({i});
      job->cancel = std::make_shared<CancelToken>(deadline);
      Push(std::move(job));
    }
    std::optional<JobBatch> batch = queue_.Take(JobKind::kStep);
    if (batch->part_count() == 1) {
      (void)queue_.Take(JobKind::kStep);
      continue;
    }
    std::this_thread::sleep_until(deadline);
    for (JobItem& item : batch->job().items) item.status = batch->job().cancel->Check();
    for (const QueuedJob& part : batch->Split()) {
      EXPECT_TRUE(absl::IsDeadlineExceeded(part.job->items[0].status));
    }
    return;
  }
}

TEST_F(JobQueueTest, ABatchWithAPartThatNobodyCancelsGoesOn) {
  auto job = Step({1});
  const auto token = job->cancel = std::make_shared<CancelToken>();
  Push(std::move(job));
  Push(Step({2}));
  std::optional<JobBatch> batch = queue_.Take(JobKind::kStep);
  ASSERT_EQ(batch->part_count(), 2u);
  token->Cancel();
  EXPECT_TRUE(batch->job().cancel->Check().ok());
}

TEST_F(JobQueueTest, WhatIsCancelledWhileItWaitsIsNotJoined) {
  auto job = Step({1});
  const auto token = job->cancel = std::make_shared<CancelToken>();
  Push(std::move(job));
  Push(Step({2}));
  Push(Step({3}));
  token->Cancel();
  std::optional<JobBatch> cancelled = queue_.Take(JobKind::kStep);
  EXPECT_THAT(Names(cancelled->job()), ElementsAre(1));
  EXPECT_TRUE(absl::IsCancelled(cancelled->job().cancel->Check()));
  EXPECT_THAT(TakeStep(), ElementsAre(2, 3));
}

}  // namespace
}  // namespace spillway

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <random>
#include <thread>

#include "engine/auditor.h"
#include "host/device/exact_attend.h"
#include "host/policy/escalation.h"
#include "tests/engine/engine_fixture.h"

namespace spillway {
namespace {

constexpr double kDelta = 0.1;

ModelSpec Spec() {
  ModelSpec spec;
  spec.layer_count = 3;
  spec.query_head_count = 4;
  spec.kv_head_count = 2;
  spec.head_dim = 16;
  EXPECT_TRUE(Normalize(spec).empty());
  return spec;
}

HeadAudit HeadOf(const AuditTable& table, int layer, int kv_head) {
  for (const HeadAudit& head : table.Heads()) {
    if (head.layer == layer && head.kv_head == kv_head) return head;
  }
  return {};
}

TEST(AuditTable, RaisesAHeadWhoseChecksFailAndNoOther) {
  AuditTable table(Spec());
  EXPECT_TRUE(table.Levels(1).empty());
  EXPECT_TRUE(table.Heads().empty());
  int level = 0;
  for (int i = 0; i < 200; ++i) {
    table.Record(1, 0, level, 5, kDelta, 2, i % 2);  // a quarter fails
    table.Record(1, 1, 0, 5, kDelta, 2, i % 20 == 0 ? 1 : 0);
    table.Record(2, 0, 0, 5, kDelta, 2, 0);
    const std::vector<int> levels = table.Levels(1);
    level = levels.empty() ? 0 : levels[0];
  }
  EXPECT_EQ(table.Levels(1), (std::vector<int>{5, 0}));  // the highest level
  EXPECT_TRUE(table.Levels(0).empty());
  EXPECT_TRUE(table.Levels(2).empty());
  EXPECT_EQ(HeadOf(table, 1, 0).check_count, 400);
  EXPECT_EQ(HeadOf(table, 1, 0).violation_count, 100);
  EXPECT_EQ(table.Heads().front().violation_count, 100);
}

// The share of failing checks falls with the level.
TEST(AuditTable, SettlesWhereTheShareIsDelta) {
  AuditTable table(Spec());
  std::mt19937 random(5);
  int64_t violations = 0, checks = 0;
  for (int i = 0; i < 20000; ++i) {
    const std::vector<int> levels = table.Levels(0);
    const int level = levels.empty() ? 0 : levels[0];
    const bool fails = std::bernoulli_distribution(0.4 * std::pow(0.7, level))(random);
    table.Record(0, 0, level, 12, kDelta, 1, fails);
    if (i < 5000) continue;
    ++checks;
    violations += fails;
  }
  EXPECT_LT(static_cast<double>(violations), kDelta * static_cast<double>(checks));
  // The level is not much higher than needed: 0.4 * 0.7^6 is 0.047.
  EXPECT_LE(table.Levels(0)[0], 6);
}

TEST(AuditTable, LowersSlowly) {
  AuditTable table(Spec());
  for (int i = 0; i < 8; ++i) table.Record(0, 1, 0, 5, kDelta, 1, 1);
  ASSERT_EQ(table.Levels(0), (std::vector<int>{0, 1}));
  for (int i = 0; i < 399; ++i) table.Record(0, 1, 1, 5, kDelta, 1, 0);
  EXPECT_EQ(table.Levels(0), (std::vector<int>{0, 1}));
  table.Record(0, 1, 1, 5, kDelta, 1, 0);
  EXPECT_TRUE(table.Levels(0).empty());
}

TEST(AuditTable, ChecksOfAnotherLevelCountAndChangeNothing) {
  AuditTable table(Spec());
  for (int i = 0; i < 100; ++i) table.Record(0, 0, 3, 5, kDelta, 1, 1);
  EXPECT_TRUE(table.Levels(0).empty());
  EXPECT_EQ(HeadOf(table, 0, 0).violation_count, 100);
  EXPECT_EQ(HeadOf(table, 0, 0).recent_check_count, 0);
}

// A sequence with rows, and attends to it whose answers the test makes.
class AuditorTest : public EngineTest {
 protected:
  AuditorTest() : sequence_(NewSequence("s")) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<float> rows(2 * kTokens * 16);
    for (float& x : rows) x = normal(random);
    EXPECT_TRUE(Fill(sequence_, rows, 0, kTokens).ok());
  }

  // An attend with exact outputs.
  JobItem Attended(int64_t queries = 1) {
    JobItem item;
    AttendQuery& attend = item.attend.emplace(Item(sequence_).attend);
    queries_.assign(static_cast<size_t>(queries) * 16, 0.5f);
    attend.q = reinterpret_cast<const std::byte*>(queries_.data());
    attend.rows = &sequence_->rows[0];
    attend.query_count = queries;
    attend.visible.assign(queries, kTokens);
    const std::vector<float> exact = *ExactAttend(model->spec, 0, attend, nullptr);
    for (int64_t t = 0; t < queries; ++t) {
      item.result.out.insert(item.result.out.end(), exact.begin(), exact.end());
    }
    item.result.certificates.assign(queries, {.promise = Promise::kStatistical});
    return item;
  }
  void Offer(Auditor& auditor, const JobItem& item, const std::vector<int>& levels = {}) {
    auditor.Offer(model, 0, item.attend->policy, levels, item);
  }
  void Await(const std::function<bool()>& done) {
    for (int i = 0; i < 5000 && !done(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    EXPECT_TRUE(done());
  }

  static constexpr int64_t kTokens = 700;
  std::shared_ptr<Sequence> sequence_;
  std::vector<float> queries_;
};

TEST_F(AuditorTest, CountsOutputsFartherThanEpsilon) {
  Auditor auditor({.share = 1, .cpu_share = 1});
  JobItem item = Attended(3);
  // The error of query 1 is half of epsilon, that of query 2 twice epsilon.
  for (int i = 0; i < 16; ++i) item.result.out[16 + i] *= 1 + 0.5f * static_cast<float>(0.1);
  for (int i = 0; i < 16; ++i) item.result.out[32 + i] *= 1 + 2 * static_cast<float>(0.1);
  Offer(auditor, item);
  Await([&] { return HeadOf(model->audits, 0, 0).check_count == 3; });
  EXPECT_EQ(HeadOf(model->audits, 0, 0).violation_count, 1);
  // Outputs without a promise are not checked. An output that is not finite is a violation.
  item.result.certificates.assign(3, {.promise = Promise::kNone});
  item.result.certificates[1].promise = Promise::kStatistical;
  item.result.out[16] = NAN;
  Offer(auditor, item);
  Await([&] { return HeadOf(model->audits, 0, 0).check_count == 4; });
  EXPECT_EQ(HeadOf(model->audits, 0, 0).violation_count, 2);
}

TEST_F(AuditorTest, ChecksTheShareThatIsAskedFor) {
  Auditor off({.share = 0});
  Offer(off, Attended());
  Auditor some({.share = 0.2, .cpu_share = 1});
  const JobItem item = Attended();
  for (int i = 0; i < 1000; ++i) {
    Offer(some, item);
    if (i % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  Await([&] {
    const int64_t chosen = HeadOf(model->audits, 0, 0).check_count + some.dropped_count();
    return chosen >= 150 && chosen <= 250;
  });
  EXPECT_EQ(off.dropped_count(), 0);
}

TEST_F(AuditorTest, StrengthensRaisedHeads) {
  Auditor auditor({.share = 1});
  Auditor off({.share = 0});
  JobItem item = Attended();
  EXPECT_TRUE(auditor.Strengthen(*model, 0, *item.attend).empty());
  EXPECT_TRUE(item.attend->tails.empty());
  for (int i = 0; i < 8; ++i) model->audits.Record(0, 0, 0, 12, kDelta, 1, 1);
  EXPECT_EQ(auditor.Strengthen(*model, 0, *item.attend), std::vector<int>{1});
  ASSERT_EQ(item.attend->tails.size(), 1u);
  EXPECT_GT(item.attend->tails[0].inflation, item.attend->policy.inflation);
  JobItem other = Attended();
  EXPECT_TRUE(off.Strengthen(*model, 0, *other.attend).empty());
  EXPECT_TRUE(auditor.Strengthen(*model, 1, *other.attend).empty());
}

TEST_F(AuditorTest, WhatFailsForGoodIsDenseUntilItHasBeenLong) {
  Auditor auditor({.share = 1});
  JobItem item = Attended();
  const Policy policy = item.attend->policy;
  const int last = DenseLevel(policy);
  for (int level = 0; level < last; ++level) {
    for (int i = 0; i < 8; ++i) model->audits.Record(0, 0, level, last, kDelta, 1, 1);
  }
  const std::vector<int> levels = auditor.Strengthen(*model, 0, *item.attend);
  EXPECT_EQ(levels, std::vector<int>{last});
  EXPECT_EQ(item.attend->policy.selector, Selector::kAll);
  item.result.certificates[0].promise = Promise::kExact;
  for (int i = 0; i < 400; ++i) auditor.Offer(model, 0, policy, levels, item);
  EXPECT_EQ(model->audits.Levels(0), std::vector<int>{last - 1});
}

TEST_F(AuditorTest, WhatWaitsIsForgottenAtTheEnd) {
  Auditor auditor({.share = 1, .cpu_share = 1e-6});
  const JobItem item = Attended();
  for (int i = 0; i < 50; ++i) Offer(auditor, item);
  EXPECT_GT(auditor.dropped_count(), 20);
  auditor.Stop();
  const int64_t dropped = auditor.dropped_count();
  Offer(auditor, item);
  EXPECT_EQ(auditor.dropped_count(), dropped + 1);
  // The auditor has released the rows.
  std::optional<absl::Status> deleted;
  sequence_ = nullptr;
  engine->Delete("s", [&](absl::Status status) { deleted = std::move(status); });
  EXPECT_TRUE(deleted->ok());
  EXPECT_EQ(model->row_pool.used_page_count(), 0);
}

}  // namespace
}  // namespace spillway

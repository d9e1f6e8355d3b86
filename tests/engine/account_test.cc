// Quotas of a namespace, and what a caller can find of other namespaces.
#include "engine/account.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "engine/caller.h"
#include "engine/errors.h"
#include "engine/regions.h"
#include "tests/engine/engine_fixture.h"

namespace spillway {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Account, ChargesToTheQuotaAndNoFurther) {
  Account account("team");
  EXPECT_TRUE(account.Charge(1 << 30).ok());
  account.Settle(-(1 << 30));
  account.SetQuota({.bytes_max = 100});
  EXPECT_TRUE(account.Charge(60).ok());
  const absl::Status refused = account.Charge(41);
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_EQ(DetailsOf(refused).reason, "QUOTA_EXHAUSTED");
  EXPECT_THAT(refused.message(), HasSubstr("the quota bytes_max of namespace team is 100 bytes: 60 "
                                           "are in use, and 41 more are needed"));
  EXPECT_EQ(account.used_bytes(), 60);
  EXPECT_TRUE(account.Charge(40).ok());
  // Lowering the quota takes nothing away, but lets nothing grow.
  account.SetQuota({.bytes_max = 50});
  EXPECT_TRUE(account.Charge(-10).ok());
  EXPECT_FALSE(account.Charge(1).ok());
  EXPECT_EQ(account.used_bytes(), 90);
}

TEST(Account, ThreadsChargeNoMoreThanTheQuota) {
  Account account("team");
  account.SetQuota({.bytes_max = 1000, .sequence_count_max = 10});
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&account] {
      for (int j = 0; j < 1000; ++j) {
        if (account.Charge(7).ok() && j % 2 == 0) account.Settle(-7);
        (void)account.AddSequence();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(account.used_bytes() % 7, 0);
  EXPECT_LE(account.used_bytes(), 1000);
  EXPECT_EQ(account.sequence_count(), 10);
}

class NamespaceTest : public EngineTest {
 protected:
  NamespaceTest() : theirs(*engine->CreateModel("a/m", model->spec, model->policy)) {}
  std::shared_ptr<Sequence> Make(const std::string& id) {
    return *engine->CreateSequence(id, theirs, theirs->policy, absl::InfiniteDuration());
  }

  const std::shared_ptr<Model> theirs;
  const std::shared_ptr<Account> account = engine->accounts().Of("a");
};

TEST_F(NamespaceTest, ARefusedStepIsChargedToNoSequence) {
  const auto first = Make("a/first"), second = Make("a/second"), third = Make("a/third");
  const int64_t before = account->used_bytes();  // of the model
  // One more page of rows: the step needs two.
  account->SetQuota({.bytes_max = before + 128 * 2 * 16 * 4});
  const std::vector<float> rows = Rows(1, 3);
  std::optional<absl::StatusOr<AttendOutcome>> refused, taken;
  AttendRequest both, alone;
  for (const auto& sequence : {first, second, third}) {
    AttendRequest& request = sequence == third ? alone : both;
    request.items.push_back(Item(sequence));
    request.items.back().append = ChunkOf(rows, 0, 3);
  }
  engine->Attend(std::move(both), Into(&refused));
  EXPECT_EQ(DetailsOf(refused->status()).reason, "QUOTA_EXHAUSTED");
  EXPECT_EQ(account->used_bytes(), before);
  engine->Attend(std::move(alone), Into(&taken));
  device.ReleaseAll();
  EXPECT_TRUE(taken->ok()) << taken->status();
}

TEST_F(NamespaceTest, NamesAreTheClients) {
  EXPECT_EQ(theirs->name, "models/m");
  EXPECT_EQ(Make("a/s")->name, "sequences/s");
  EXPECT_EQ(engine->registry().FindSequence("b/s").status(), SequenceNotFound("sequences/s"));
  EXPECT_EQ(engine->registry().FindModel("b/m").status(), ModelNotFound("models/m"));
  EXPECT_THAT(engine->CreateModel("a/m", model->spec, model->policy).status().message(),
              HasSubstr("models/m exists already"));
}

TEST_F(NamespaceTest, ListsAreOfOneNamespace) {
  const auto ids = [](const auto& page) {
    std::vector<std::string> ids;
    for (const auto& item : page.items) ids.push_back(item->id);
    return ids;
  };
  NewSequence("a");
  NewSequence("s");
  Make("a/r");
  Make("a/s");
  Make("b/s");
  const Registry& registry = engine->registry();
  EXPECT_THAT(ids(registry.ListModelsOf("", "", 9)), ElementsAre("m"));
  EXPECT_THAT(ids(registry.ListModelsOf("a", "", 9)), ElementsAre("a/m"));
  EXPECT_THAT(ids(registry.ListModelsOf("b", "", 9)), ElementsAre());
  EXPECT_THAT(ids(registry.ListSequencesOf("", nullptr, "", 9)), ElementsAre("a", "s"));
  EXPECT_THAT(ids(registry.ListSequencesOf("a", nullptr, "", 9)), ElementsAre("a/r", "a/s"));
  EXPECT_THAT(ids(registry.ListSequencesOf("a", nullptr, "r", 9)), ElementsAre("a/s"));
  EXPECT_THAT(ids(registry.ListSequencesOf("a", nullptr, "s", 9)), ElementsAre());
  const Page<Sequence> first = registry.ListSequencesOf("a", nullptr, "", 1);
  EXPECT_THAT(ids(first), ElementsAre("a/r"));
  EXPECT_TRUE(first.more);
  EXPECT_FALSE(registry.ListSequencesOf("a", nullptr, "r", 1).more);
}

TEST_F(NamespaceTest, AnAppendBeyondTheQuotaLeavesNothing) {
  const std::shared_ptr<Sequence> sequence = Make("a/s");
  const int64_t empty = account->used_bytes();  // of the model
  const std::vector<float> rows = Rows(0, 300, 2);
  ASSERT_TRUE(Fill(sequence, rows, 0, 100).ok());
  const int64_t held = sequence->snapshot().row_bytes;
  EXPECT_EQ(account->used_bytes(), empty + held);
  account->SetQuota({.bytes_max = empty + 2 * held});
  const int64_t pages = theirs->row_pool.used_page_count();
  EXPECT_EQ(DetailsOf(Fill(sequence, Rows(0, 200, 2), 100, 200)).reason, "QUOTA_EXHAUSTED");
  EXPECT_EQ(account->used_bytes(), empty + held);
  EXPECT_EQ(theirs->row_pool.used_page_count(), pages);
  EXPECT_EQ(sequence->snapshot().token_count, 100);
  EXPECT_TRUE(Fill(sequence, Rows(0, 100, 2), 100, 100).ok());
  EXPECT_EQ(account->used_bytes(), empty + 2 * held);
  engine->Delete("a/s", [](const absl::Status& status) { EXPECT_TRUE(status.ok()); });
  EXPECT_EQ(account->used_bytes(), empty);
  EXPECT_EQ(account->sequence_count(), 0);
}

TEST_F(NamespaceTest, RegionsAreOfWhoAttachedThem) {
  RegionTable regions(RegionTable::Kind::kSessions, &budget, &engine->accounts());
  const Caller a(std::make_shared<Grant>("a", "a"));
  const Caller b(std::make_shared<Grant>("b", "b"));
  const std::string session = regions.OpenSession();
  const std::string id = (*regions.Attach(a, session, 4096))->id;
  EXPECT_TRUE(regions.Find(a, id).ok());
  const absl::Status none = regions.Find(b, "0").status();
  EXPECT_EQ(DetailsOf(regions.Find(b, id).status()).reason, DetailsOf(none).reason);
  EXPECT_TRUE(absl::IsNotFound(regions.Find(Caller(), id).status()));
  const absl::Status unknown = regions.List(b, "0").status();
  EXPECT_EQ(regions.List(b, session).status(), unknown);
  EXPECT_EQ(regions.Attach(b, session, 4096).status(), unknown);
  EXPECT_EQ(regions.Detach(b, session, id), unknown);
  EXPECT_EQ(regions.List(a, session)->size(), 1);
  EXPECT_TRUE(regions.Detach(a, session, id).ok());
}

TEST(Caller, IsRefusedOnceItsTokenIsGone) {
  const auto grant = std::make_shared<Grant>("a", "a");
  const Caller caller(grant);
  EXPECT_TRUE(caller.Check().ok());
  EXPECT_EQ(caller.IdOf("x"), "a/x");
  EXPECT_EQ(Caller().IdOf("x"), "x");
  grant->revoked = true;
  EXPECT_TRUE(absl::IsUnauthenticated(caller.Check()));
}

}  // namespace
}  // namespace spillway

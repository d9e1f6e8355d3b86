// Clients that come and go, and the sequences that they leave behind.
#include "engine/presence.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "tests/engine/engine_fixture.h"

namespace spillway {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr SteadyTime At(int64_t seconds) {
  return SteadyTime(std::chrono::seconds(1000 + seconds));
}

TEST(PresenceTableTest, AClientIsThereWhileAnyOfItsConnectionsIs) {
  PresenceTable table;
  const std::shared_ptr<Presence> client = table.Of("a", At(0));
  EXPECT_EQ(client->gone_time(), At(0)) << "heard of, and not there";
  table.Come(*client);
  table.Come(*client);
  EXPECT_EQ(client->gone_time(), kNever);
  EXPECT_EQ(table.there_count(), 1);
  table.Go(*client, At(5));
  EXPECT_EQ(client->gone_time(), kNever);
  table.Go(*client, At(7));
  EXPECT_EQ(client->gone_time(), At(7));
  EXPECT_EQ(table.there_count(), 0);
}

TEST(PresenceTableTest, WhoComesAgainIsTheSameClientWhileThatMatters) {
  PresenceTable table;
  std::shared_ptr<Presence> client = table.Of("a", At(0));
  table.Come(*client);
  table.Go(*client, At(1));
  EXPECT_EQ(table.Of("a", At(2)), client);
  EXPECT_NE(table.Of("b", At(2)), client);
  client.reset();  // no sequence refers to it: it is forgotten
  EXPECT_EQ(table.Of("a", At(9))->gone_time(), At(9));
}

TEST(PresenceTableTest, NobodyGoesBecauseTheDaemonDoes) {
  PresenceTable table;
  const std::shared_ptr<Presence> client = table.Of("a", At(0));
  table.Come(*client);
  table.Freeze();
  table.Go(*client, At(1));
  EXPECT_EQ(client->gone_time(), kNever);
}

TEST(SequenceUsersTest, TheLastToGoCounts) {
  PresenceTable table;
  SequenceUsers users;
  EXPECT_EQ(users.gone_time(), SteadyTime::min());
  const std::shared_ptr<Presence> a = table.Of("a", At(0)), b = table.Of("b", At(0));
  table.Come(*a);
  table.Come(*b);
  users.Note(a);
  users.Note(b);
  users.Note(a);
  table.Go(*b, At(3));
  EXPECT_EQ(users.gone_time(), kNever);
  table.Go(*a, At(2));
  EXPECT_EQ(users.gone_time(), At(3));
  users.Note(nullptr);
  EXPECT_EQ(users.gone_time(), kNever) << "who says nothing never goes";
}

TEST(SequenceUsersTest, KeepsFewOfThoseThatAreGoneAndAllThatAreThere) {
  PresenceTable table;
  SequenceUsers users;
  const std::shared_ptr<Presence> there = table.Of("there", At(0));
  table.Come(*there);
  users.Note(there);
  std::weak_ptr<Presence> first;
  for (int i = 0; i < 100; ++i) {
    const std::shared_ptr<Presence> client = table.Of(absl::StrCat("c", i), At(i));
    if (i == 0) first = client;
    users.Note(client);
  }
  EXPECT_TRUE(first.expired());
  EXPECT_EQ(users.gone_time(), kNever);
  table.Go(*there, At(50));
  EXPECT_EQ(users.gone_time(), At(99));
}

class AbandonedTest : public EngineTest {
 protected:
  std::shared_ptr<Presence> Come(const std::string& id) {
    std::shared_ptr<Presence> client = engine->ClientOf(id);
    engine->clients().Come(*client);
    return client;
  }
  std::shared_ptr<Sequence> Make(const std::string& id, const std::shared_ptr<Presence>& client,
                                 bool named = false) {
    return *engine->CreateSequence(id, model, model->policy, absl::Hours(1), {named, client});
  }
  // What has expired `seconds` later.
  std::vector<std::string> After(int64_t seconds) {
    now += std::chrono::seconds(seconds);
    std::vector<std::string> names;
    for (const ExpiredSequence& expired : engine->SweepExpired()) {
      names.push_back(absl::StrCat(
          expired.name, expired.why == ExpiredSequence::Why::kAbandoned ? "" : " by its ttl"));
    }
    return names;
  }
};

TEST_F(AbandonedTest, GoesAGraceTimeAfterItsClientUnlessItIsNamed) {
  const auto client = Come("c");
  const auto sequence = Make("s", client);
  Make("n", client, /*named=*/true);
  EXPECT_EQ(sequence->expire_time(), now + std::chrono::hours(1));
  EXPECT_THAT(After(1000), IsEmpty());
  EXPECT_FALSE(sequence->abandoned());
  engine->ClientGoes(*client);
  EXPECT_TRUE(sequence->abandoned());
  EXPECT_EQ(sequence->expire_time(), now + std::chrono::seconds(60));
  EXPECT_THAT(After(59), IsEmpty());
  now += std::chrono::seconds(1);
  EXPECT_TRUE(absl::IsNotFound(engine->registry().UseSequence("s", nullptr).status()));
  EXPECT_THAT(After(0), ElementsAre("sequences/s"));
  EXPECT_THAT(After(3600), ElementsAre("sequences/n by its ttl"));
  EXPECT_EQ(engine->counters().abandoned_expiry_count, 1);
  EXPECT_EQ(engine->counters().idle_expiry_count, 1);
}

TEST_F(AbandonedTest, StaysWhereItsClientComesAgainOrAnotherUsesIt) {
  const auto client = Come("c"), other = Come("o");
  const auto sequence = Make("s", client);
  engine->ClientGoes(*client);
  EXPECT_THAT(After(50), IsEmpty());
  EXPECT_EQ(Come("c"), client);
  EXPECT_THAT(After(1000), IsEmpty());
  EXPECT_TRUE(engine->registry().UseSequence("s", other).ok());
  engine->ClientGoes(*client);
  EXPECT_THAT(After(1000), IsEmpty());
  engine->ClientGoes(*other);
  EXPECT_THAT(After(59), IsEmpty());
  EXPECT_THAT(After(1), ElementsAre("sequences/s"));
}

TEST_F(AbandonedTest, ACopyIsItsMakers) {
  const auto client = Come("c"), other = Come("o");
  const auto source = Make("s", client);
  std::optional<absl::StatusOr<std::shared_ptr<Sequence>>> copy;
  engine->Fork(source, "f", Into(&copy), {false, other});
  ASSERT_TRUE((*copy).ok());
  engine->ClientGoes(*client);
  EXPECT_THAT(After(60), ElementsAre("sequences/s"));
  engine->ClientGoes(*other);
  EXPECT_THAT(After(60), ElementsAre("sequences/f"));
}

TEST_F(AbandonedTest, EveryCallCountsOfAClientThatKeepsNoConnection) {
  Make("s", engine->ClientOf("c"));
  for (int i = 0; i < 4; ++i) {
    EXPECT_THAT(After(50), IsEmpty());
    EXPECT_TRUE(engine->registry().UseSequence("s", engine->ClientOf("c")).ok());
  }
  EXPECT_THAT(After(60), ElementsAre("sequences/s"));
}

TEST_F(AbandonedTest, OfAClientThatDoesNotSayWhoItIsTheTtlCounts) {
  Make("s", nullptr);
  const auto client = Come("c");
  Make("t", client);
  EXPECT_TRUE(engine->registry().UseSequence("t", nullptr).ok());
  engine->ClientGoes(*client);
  EXPECT_THAT(After(3599), IsEmpty());
  EXPECT_THAT(After(1), ElementsAre("sequences/s by its ttl", "sequences/t by its ttl"));
}

TEST_F(AbandonedTest, AGraceTimeThatChangesIsOfThoseTooThatAreThere) {
  const auto client = Come("c");
  const auto sequence = Make("s", client);
  const SteadyTime made = now;
  engine->ClientGoes(*client);
  engine->SetUnnamedGrace(absl::InfiniteDuration());
  EXPECT_EQ(sequence->expire_time(), made + std::chrono::hours(1));
  EXPECT_THAT(After(70), IsEmpty());
  engine->SetUnnamedGrace(absl::Seconds(90));
  EXPECT_EQ(sequence->expire_time(), made + std::chrono::seconds(90));
  engine->SetUnnamedGrace(absl::Milliseconds(1500));
  EXPECT_THAT(After(0), ElementsAre("sequences/s"));
}

TEST_F(AbandonedTest, GoesByAnInfiniteTtlToo) {
  const auto client = Come("c");
  const auto sequence =
      *engine->CreateSequence("s", model, model->policy, absl::InfiniteDuration(), {false, client});
  EXPECT_EQ(sequence->expire_time(), kNever);
  engine->ClientGoes(*client);
  EXPECT_THAT(After(60), ElementsAre("sequences/s"));
}

}  // namespace
}  // namespace spillway

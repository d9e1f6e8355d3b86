#include "host/device/residency.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

namespace spillway {
namespace {

// A sequence that holds 1 byte until it is asked to give it up.
class Holder : public Residency::Member {
 public:
  Holder(Residency* residency, std::string name, std::vector<std::string>* given_up)
      : residency_(residency), name_(std::move(name)), given_up_(given_up) {
    residency_->Add(*this);
  }
  ~Holder() override { residency_->Remove(*this); }
  void GiveUp() override {
    given_up_->push_back(name_);
    holds_ = false;
  }
  int64_t held_bytes() const override { return holds_ ? 1 : 0; }
  int64_t AheadPages(const CopyLayers& of) const override { return &of == layers ? ahead : 0; }
  void Hold() { holds_ = true; }
  ResidencyUse Use() { return {*residency_, *this}; }

  const CopyLayers* layers = nullptr;
  int64_t ahead = 0;

 private:
  Residency* residency_;
  const std::string name_;
  std::vector<std::string>* const given_up_;
  bool holds_ = true;
};

class ResidencyTest : public ::testing::Test {
 protected:
  using Names = std::vector<std::string>;

  void Pass(absl::Duration time) { now_ = After(now_, time); }

  SteadyTime now_;
  Residency residency_{[this] { return now_; }};
  Names given_up_;
  Holder a_{&residency_, "a", &given_up_};
  Holder b_{&residency_, "b", &given_up_};
  Holder c_{&residency_, "c", &given_up_};
};

TEST_F(ResidencyTest, ThoseThatAreNotInUseGiveUpAtOnceIfAsked) {
  Pass(absl::Seconds(5));
  for (Holder* used : {&b_, &a_}) used->Use();
  const ResidencyUse use = c_.Use();
  Pass(absl::Milliseconds(1));
  EXPECT_FALSE(residency_.MakeRoom());
  EXPECT_TRUE(residency_.MakeRoom(absl::ZeroDuration()));
  EXPECT_TRUE(residency_.MakeRoom(absl::ZeroDuration()));
  EXPECT_FALSE(residency_.MakeRoom(absl::ZeroDuration()));
  EXPECT_EQ(given_up_, (Names{"b", "a"}));
}

TEST_F(ResidencyTest, TheLongestIdleGivesUpFirst) {
  for (Holder* used : {&b_, &c_, &a_}) {
    Pass(absl::Seconds(5));
    used->Use();
  }
  Pass(absl::Seconds(5));
  EXPECT_TRUE(residency_.MakeRoom());
  EXPECT_TRUE(residency_.MakeRoom());
  EXPECT_EQ(given_up_, (Names{"b", "c"}));
  EXPECT_TRUE(residency_.MakeRoom());
  // No sequence holds anything now.
  EXPECT_FALSE(residency_.MakeRoom());
  EXPECT_EQ(given_up_, (Names{"b", "c", "a"}));
  b_.Hold();
  EXPECT_TRUE(residency_.MakeRoom());
  EXPECT_EQ(given_up_.back(), "b");
}

TEST_F(ResidencyTest, WhoIsUsedKeepsWhatItHas) {
  Pass(absl::Seconds(5));
  const ResidencyUse outer = a_.Use();
  { const ResidencyUse inner = a_.Use(); }
  b_.Use();
  Pass(absl::Seconds(0.15));
  // a is in use, b was used 0.15 s ago, and c has not been used for 5.15 s.
  EXPECT_TRUE(residency_.MakeRoom());
  EXPECT_EQ(given_up_, Names{"c"});
  EXPECT_FALSE(residency_.MakeRoom());
  Pass(absl::Seconds(0.15));
  EXPECT_TRUE(residency_.MakeRoom());
  EXPECT_EQ(given_up_, (Names{"c", "b"}));
  // A sequence in use keeps its memory.
  Pass(absl::Hours(1));
  EXPECT_FALSE(residency_.MakeRoom());
}

TEST_F(ResidencyTest, AUseWaitsWhileItsMemoryIsGivenUp) {
  // Gives up its memory until somebody has tried to use it for a while.
  struct Slow : Residency::Member {
    void GiveUp() override {
      giving = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      giving = false;
    }
    int64_t held_bytes() const override { return 1; }
    int64_t AheadPages(const CopyLayers&) const override { return 0; }
    std::atomic<bool> giving = false;
  } member;
  residency_.Add(member);
  a_.Use();
  b_.Use();
  c_.Use();
  Pass(absl::Hours(1));
  a_.Use();
  b_.Use();
  c_.Use();
  std::thread other([&] { EXPECT_TRUE(residency_.MakeRoom()); });
  while (!member.giving) std::this_thread::yield();
  {
    const ResidencyUse use(residency_, member);
    EXPECT_FALSE(member.giving);
  }
  other.join();
  residency_.Remove(member);
}

TEST_F(ResidencyTest, TheIdleNeedNoPagesAhead) {
  const CopyLayers layers(4), others(4);
  a_.layers = c_.layers = &layers;
  b_.layers = &others;
  a_.ahead = 1;
  b_.ahead = 10;
  c_.ahead = 100;
  EXPECT_EQ(residency_.AheadPages(layers), 101);
  EXPECT_EQ(residency_.AheadPages(others), 10);
  const ResidencyUse use = a_.Use();
  Pass(absl::Seconds(0.2));
  b_.Use();
  Pass(absl::Seconds(0.2));
  EXPECT_EQ(residency_.AheadPages(layers), 1);
  EXPECT_EQ(residency_.AheadPages(others), 10);
}

TEST_F(ResidencyTest, ACopyIsDueOnceAsMuchWasMoved) {
  residency_.CountMoved(a_, 99);
  EXPECT_FALSE(residency_.TakeTurn(a_, 100));
  EXPECT_FALSE(residency_.TakeTurn(b_, 100));
  residency_.CountMoved(a_, 1);
  EXPECT_TRUE(residency_.TakeTurn(a_, 100));
  // Counting begins again.
  EXPECT_FALSE(residency_.TakeTurn(a_, 100));
  // What a moved before it gave up its copy does not count.
  residency_.CountMoved(a_, 1000);
  Pass(absl::Seconds(5));
  EXPECT_TRUE(residency_.MakeRoom());
  EXPECT_EQ(given_up_, Names{"a"});
  EXPECT_FALSE(residency_.TakeTurn(a_, 100));
}

}  // namespace
}  // namespace spillway

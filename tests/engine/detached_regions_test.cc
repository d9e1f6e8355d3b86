// Memory of regions that clients keep after the regions have ended: freed, and charged while held.
#include "engine/detached_regions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstring>
#include <memory>
#include <vector>

#include "engine/errors.h"
#include "engine/regions.h"

namespace spillway {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMiB = 1 << 20;

// What a client has of a region: its descriptor and a mapping.
class Kept {
 public:
  explicit Kept(const Region& region)
      : descriptor_(*region.memory->Share()), bytes_(region.bytes.size()) {
    void* const mapped =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_.get(), 0);
    EXPECT_NE(mapped, MAP_FAILED);
    mapped_ = static_cast<std::byte*>(mapped);
  }
  ~Kept() {
    if (mapped_ != nullptr) munmap(mapped_, bytes_);
  }
  Kept(Kept&& other) noexcept
      : descriptor_(std::move(other.descriptor_)),
        bytes_(other.bytes_),
        mapped_(std::exchange(other.mapped_, nullptr)) {}

  void Write() { std::memset(mapped_, 7, bytes_); }
  std::byte first() const { return mapped_[0]; }
  int64_t page_bytes() const {
    struct stat info {};
    EXPECT_EQ(fstat(descriptor_.get(), &info), 0);
    return info.st_blocks * 512;
  }

 private:
  Descriptor descriptor_;
  size_t bytes_;
  std::byte* mapped_;
};

class DetachedRegionsTest : public ::testing::Test {
 protected:
  MemoryBudget budget{8 * kMiB};
  AccountTable accounts;
  const std::shared_ptr<Account> account = accounts.Of("a");
  RegionTable regions{RegionTable::Kind::kSessions, &budget, &accounts, nullptr, 16};
  const Caller caller{std::make_shared<Grant>("a", "a")};
  const std::string session = regions.OpenSession();
};

// Attached, kept, detached and written again, as often as the table allows.
TEST_F(DetachedRegionsTest, ClientsHoldNoMoreThanTheLimit) {
  std::vector<Kept> kept;
  absl::Status refused;
  int64_t held = 0;
  for (int i = 0; i < 20 && refused.ok(); ++i) {
    absl::StatusOr<std::shared_ptr<Region>> region = regions.Attach(caller, session, 2 * kMiB);
    refused = region.status();
    if (!region.ok()) break;
    kept.emplace_back(**region);
    kept.back().Write();
    const std::string id = (*region)->id;
    region->reset();
    ASSERT_TRUE(regions.Detach(caller, session, id).ok());
    // Its pages are free.
    EXPECT_EQ(kept.back().page_bytes(), 0);
    EXPECT_EQ(kept.back().first(), std::byte{0});
    kept.back().Write();
    held += kept.back().page_bytes();
  }
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_EQ(held, 8 * kMiB);
  EXPECT_EQ(budget.used_bytes(), 8 * kMiB);
  EXPECT_EQ(account->used_bytes(), 8 * kMiB);
  // The end of the session changes nothing, but the end of the mappings does.
  regions.CloseSession(session);
  regions.Collect();
  EXPECT_EQ(budget.used_bytes(), 8 * kMiB);
  while (kept.size() > 1) kept.pop_back();
  regions.Collect();
  EXPECT_EQ(budget.used_bytes(), 2 * kMiB);
  kept.clear();
  EXPECT_TRUE(regions.Attach(caller, regions.OpenSession(), 8 * kMiB).ok());
}

TEST_F(DetachedRegionsTest, CountAgainstTheQuotaAndTheNumberOfRegions) {
  account->SetQuota({.bytes_max = 3 * kMiB});
  std::vector<Kept> kept;
  kept.emplace_back(**regions.Attach(caller, session, 2 * kMiB));
  const auto id = [this] { return regions.List(caller, session)->front()->id; };
  ASSERT_TRUE(regions.Detach(caller, session, id()).ok());
  EXPECT_EQ(DetailsOf(regions.Attach(caller, session, 2 * kMiB).status()).reason,
            "QUOTA_EXHAUSTED");
  for (int i = 1; i < 16; ++i) {
    const auto region = regions.Attach(caller, session, 4096);
    ASSERT_TRUE(region.ok()) << region.status();
    kept.emplace_back(**region);
  }
  while (!regions.List(caller, session)->empty()) {
    ASSERT_TRUE(regions.Detach(caller, session, id()).ok());
  }
  const absl::Status refused = regions.Attach(caller, session, 4096).status();
  EXPECT_EQ(DetailsOf(refused).reason, "REGION_COUNT_EXHAUSTED");
  EXPECT_THAT(refused.message(), HasSubstr("the daemon has 16 regions already"));
  kept.clear();
  EXPECT_TRUE(regions.Attach(caller, session, 2 * kMiB).ok());
  EXPECT_EQ(account->used_bytes(), 2 * kMiB);
}

TEST_F(DetachedRegionsTest, KeepTheirContentWhenTheProcessEnds) {
  std::shared_ptr<Region> region = *regions.Attach(caller, session, kMiB);
  Kept kept(*region);
  kept.Write();
  region.reset();
  regions.KeepContent();
  regions.CloseSession(session);
  EXPECT_EQ(kept.first(), std::byte{7});
  EXPECT_EQ(account->used_bytes(), 0);
}

}  // namespace
}  // namespace spillway

#include "host/device/workspace_shares.h"

#include <gtest/gtest.h>

namespace spillway {
namespace {

constexpr int64_t kMib = int64_t{1} << 20;
constexpr int64_t kGib = int64_t{1} << 30;

TEST(WorkspaceShares, ASixthOfMuchMemory) {
  const WorkspaceShares shares = WorkspaceShares::Of(12 * kGib, /*has_copies=*/true, 0);
  EXPECT_EQ(shares.slots_of_kind, 2);
  EXPECT_EQ(shares.wave_bytes, 512 * kMib);
  EXPECT_EQ(shares.step_bytes, kGib);
  EXPECT_EQ(shares.total_bytes, 2 * kGib);
  // At most 4 GiB.
  EXPECT_EQ(WorkspaceShares::Of(100 * kGib, false, 0).total_bytes, 4 * kGib);
  EXPECT_EQ(WorkspaceShares::Of(100 * kGib, false, 0).wave_bytes, kGib);
}

TEST(WorkspaceShares, LittleMemoryHasOneJobOfAKind) {
  // Two jobs of 32 MiB, a step, and dense attends beside it.
  WorkspaceShares shares = WorkspaceShares::Of(2 * kGib, /*has_copies=*/true, 0);
  EXPECT_EQ(shares.slots_of_kind, 1);
  EXPECT_EQ(shares.wave_bytes, 32 * kMib);
  EXPECT_EQ(shares.step_bytes, 256 * kMib);
  EXPECT_EQ(shares.total_bytes, (64 + 256 + 128) * kMib);
  shares = WorkspaceShares::Of(2 * kGib, /*has_copies=*/false, 0);
  EXPECT_EQ(shares.total_bytes, (64 + 256) * kMib);
}

TEST(WorkspaceShares, AsAskedFor) {
  // A fifth for four jobs, two fifths for a step.
  WorkspaceShares shares = WorkspaceShares::Of(12 * kGib, /*has_copies=*/true, 1000 * kMib);
  EXPECT_EQ(shares.slots_of_kind, 2);
  EXPECT_EQ(shares.wave_bytes, 50 * kMib);
  EXPECT_EQ(shares.step_bytes, 400 * kMib);
  EXPECT_EQ(shares.total_bytes, 1000 * kMib);
  shares = WorkspaceShares::Of(2 * kGib, /*has_copies=*/false, 100 * kMib);
  EXPECT_EQ(shares.slots_of_kind, 1);
  EXPECT_EQ(shares.wave_bytes, 10 * kMib);
  EXPECT_EQ(shares.step_bytes, 40 * kMib);
  EXPECT_EQ(shares.total_bytes, 100 * kMib);
}

}  // namespace
}  // namespace spillway

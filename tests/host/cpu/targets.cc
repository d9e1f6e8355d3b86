#include "tests/host/cpu/targets.h"

#include <gtest/gtest.h>

#include "hwy/targets.h"

namespace spillway {
namespace {

// On x86, the kernels are compiled for AVX2 and later only, so older targets are left out.
// Elsewhere there is only one target, the default.
std::vector<int64_t> Targets() {
  std::vector<int64_t> targets;
#if HWY_ARCH_X86
  for (const int64_t target : {HWY_AVX2, HWY_AVX3, HWY_AVX3_DL}) {
    if ((hwy::SupportedTargets() & target) != 0) targets.push_back(target);
  }
#else
  targets.push_back(hwy::SupportedTargets() & -hwy::SupportedTargets());
#endif
  return targets;
}

}  // namespace

std::vector<std::byte> SameOnEveryTarget(
    const std::function<void(std::vector<std::byte>&)>& compute) {
  std::vector<std::byte> first;
  const std::vector<int64_t> targets = Targets();
  EXPECT_FALSE(targets.empty());
  for (size_t i = 0; i < targets.size(); ++i) {
    hwy::SetSupportedTargetsForTest(targets[i]);
    hwy::GetChosenTarget().Update(targets[i]);
    std::vector<std::byte> bytes;
    compute(bytes);
    if (i == 0) {
      first = std::move(bytes);
    } else {
      EXPECT_TRUE(bytes == first) << hwy::TargetName(targets[i]) << " differs from "
                                  << hwy::TargetName(targets[0]);
    }
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().DeInit();
  return first;
}

}  // namespace spillway

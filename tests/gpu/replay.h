#pragma once

#include <gtest/gtest.h>

#include <span>
#include <string>
#include <vector>

#include "tests/conformance/device_bench.h"

// Decode steps, whose attends a GPU replays as graphs.
namespace spillway {

inline const DeviceFactory* CudaFactory() {
  for (const DeviceFactory& factory : DeviceFactories()) {
    if (factory.name == "cuda") return &factory;
  }
  return nullptr;
}

#define SKIP_WITHOUT_GPU() \
  if (CudaFactory() == nullptr) GTEST_SKIP() << "this machine has no CUDA GPU"

struct Case {
  std::string name;
  Policy policy;
};

inline void ExpectSame(const JobItem& a, const JobItem& b, const std::string& what) {
  ASSERT_TRUE(a.status.ok()) << what << ": " << a.status;
  ASSERT_TRUE(b.status.ok()) << what << ": " << b.status;
  EXPECT_EQ(a.result.out, b.result.out) << what;
  EXPECT_EQ(a.result.lse, b.result.lse) << what;
  EXPECT_EQ(a.result.touched_row_counts, b.result.touched_row_counts) << what;
}

// Decodes with a sequence of the bench from 3,900 to 4,300 tokens, with a step after every step(n)
// tokens. Some of the steps must give the same bits as a new device, which has no graphs yet.
template <typename Step>
void ExpectBitsOfANewSequence(DeviceBench& bench, const reference::Context& context, const Case& c,
                              const std::vector<float>& q, Step step,
                              std::span<const std::byte> safetensors = {}) {
  BenchSequence decoding(bench);
  ASSERT_TRUE(decoding.Append(context, 0, 3900).ok());
  for (int64_t n = 3900; n < 4300; n += step(n)) {
    ASSERT_TRUE(decoding.Append(context, decoding.token_count(), n).ok());
    const JobItem replayed = decoding.Step(context, c.policy, q);
    if (n % 5 != 0) continue;
    DeviceBench fresh(*CudaFactory(), bench.spec(), 0, safetensors);
    BenchSequence plain(fresh);
    ASSERT_TRUE(plain.Append(context, 0, n + 1).ok());
    ExpectSame(replayed, plain.Attend(c.policy, q), c.name + " at " + std::to_string(n));
  }
}

}  // namespace spillway

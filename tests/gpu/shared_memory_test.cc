// Memory that a device shares with another process, tested within one process, and the kernel with
// which a client copies the tensors of a step.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gpu/device/cuda_device.h"
#include "gpu/kernels/step_copy.h"
#include "gtest/gtest.h"
#include "tests/gpu/device_array.h"

namespace spillway::cuda {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

class SharedMemoryTest : public ::testing::Test {
 protected:
  int64_t used_bytes() const { return device->memory()->shared_used_bytes; }
  // Waits for this count: memory that is given up is freed a moment later.
  bool Settles(int64_t bytes) const {
    for (int i = 0; i < 1000 && used_bytes() != bytes; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return used_bytes() == bytes;
  }

  MemoryBudget host_budget{int64_t{1} << 30};
  std::unique_ptr<Device> device =
      *CreateCudaDevice({.memory_limit_bytes = int64_t{1} << 30}, &host_budget);
};

TEST_F(SharedMemoryTest, IsZeroedCountedAndGivenBack) {
  const std::string& uuid = device->info().uuid;
  for (const std::string& name : {device->info().name, uuid}) {
    auto memory = device->AllocateShared(name, 3 * kMiB);
    ASSERT_TRUE(memory.ok()) << memory.status();
    EXPECT_EQ((*memory)->bytes().size(), 4 * kMiB);
    EXPECT_EQ((*memory)->handle().size(), 64);
    EXPECT_EQ(&(*memory)->device(), device.get());
    EXPECT_EQ(used_bytes(), 4 * kMiB);
    std::vector<std::byte> bytes(4 * kMiB, std::byte{1});
    ASSERT_TRUE(
        (*memory)->Read((*memory)->bytes().data(), 4 * kMiB, 4 * kMiB, 1, bytes.data()).ok());
    EXPECT_EQ(bytes, std::vector<std::byte>(4 * kMiB));
    std::fill(bytes.begin(), bytes.end(), std::byte{7});
    ASSERT_TRUE((*memory)->Write((*memory)->bytes().data(), bytes.data(), 4 * kMiB).ok());
    memory->reset();
    EXPECT_TRUE(Settles(0));
  }
}

TEST_F(SharedMemoryTest, IsReadByAnyStride) {
  const auto memory = *device->AllocateShared(device->info().name, 1);
  std::vector<uint16_t> values(1 << 16);
  std::iota(values.begin(), values.end(), uint16_t{0});
  ASSERT_TRUE(memory
                  ->Write(memory->bytes().data(), reinterpret_cast<const std::byte*>(values.data()),
                          static_cast<int64_t>(values.size() * 2))
                  .ok());
  for (const int64_t stride : {0, 2, 32, 64, 66, 4096}) {
    constexpr int64_t kRows = 20, kRowBytes = 64, kAt = 130;
    std::vector<uint16_t> got(kRows * kRowBytes / 2);
    ASSERT_TRUE(memory
                    ->Read(memory->bytes().data() + kAt, stride, kRowBytes, kRows,
                           reinterpret_cast<std::byte*>(got.data()))
                    .ok());
    for (int64_t i = 0; i < static_cast<int64_t>(got.size()); ++i) {
      const int64_t row = i / (kRowBytes / 2), column = i % (kRowBytes / 2);
      ASSERT_EQ(got[i], values[kAt / 2 + row * stride / 2 + column]) << stride << " " << i;
    }
  }
}

TEST_F(SharedMemoryTest, IsBoundedByTheDevicesLimit) {
  const auto refused = device->AllocateShared(device->info().name, int64_t{2} << 30);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  EXPECT_THAT(refused.status().message(), HasSubstr("--gpu-memory-limit"));
  const auto huge = device->AllocateShared(device->info().name, int64_t{1} << 62);
  EXPECT_TRUE(absl::IsResourceExhausted(huge.status())) << huge.status();
  const auto largest =
      device->AllocateShared(device->info().name, std::numeric_limits<int64_t>::max());
  EXPECT_TRUE(absl::IsResourceExhausted(largest.status())) << largest.status();
  const auto other = device->AllocateShared("cuda:77", 1);
  EXPECT_TRUE(absl::IsInvalidArgument(other.status())) << other.status();
  EXPECT_THAT(other.status().message(), HasSubstr(device->info().uuid));
  EXPECT_EQ(used_bytes(), 0);
}

TEST_F(SharedMemoryTest, AnExchangeCopiesItsInputs) {
  auto opened = device->OpenExchange(1000, 512);
  ASSERT_TRUE(opened.ok()) << opened.status();
  DeviceExchange& exchange = **opened;
  EXPECT_NE(exchange.stream(), nullptr);
  std::vector<std::byte> values(512, std::byte{5});
  Check(CopyToGpu(exchange.shared().bytes().data(), values.data(), 512));
  ASSERT_TRUE(exchange.TakeInputs(512).ok());
  ASSERT_TRUE(exchange.Await().ok());
  Check(cudaMemset(exchange.shared().bytes().data(), 0, 512));
  std::vector<std::byte> taken(512);
  Check(cudaMemcpy(taken.data(), exchange.inputs(), 512, cudaMemcpyDefault));
  EXPECT_EQ(taken, values);
  opened->reset();
  EXPECT_TRUE(Settles(0));
}

// Up to three tensors of one step, each with its own alignment: [B, T, H] rows.
TEST(StepCopy, CopiesRowsByTheirStrides) {
  struct Case {
    int32_t bytes;
    int64_t at;   // offset of the first row, in bytes
    int64_t gap;  // bytes between rows
  };
  for (const std::vector<Case>& cases :
       {std::vector<Case>{{256, 0, 0}, {512, 0, 32}, {128, 16, 64}},
        std::vector<Case>{{256, 4, 4}, {36, 0, 0}, {32, 2, 2}}, std::vector<Case>{{64, 0, 2}}}) {
    constexpr int kB = 3, kT = 2;
    StepCopy copy;
    copy.sequence_count = kB;
    copy.token_count = kT;
    copy.tensor_count = static_cast<int32_t>(cases.size());
    std::vector<std::unique_ptr<DeviceArray<uint8_t>>> from, to;
    std::mt19937 random(3);
    for (size_t i = 0; i < cases.size(); ++i) {
      const Case& c = cases[i];
      const int heads = 5 + static_cast<int>(i);
      const int64_t row = c.bytes + c.gap;
      std::vector<uint8_t> values(c.at + kB * kT * heads * row + 16);
      for (uint8_t& value : values) value = static_cast<uint8_t>(random());
      from.push_back(std::make_unique<DeviceArray<uint8_t>>(values));
      to.push_back(std::make_unique<DeviceArray<uint8_t>>(
          std::vector<uint8_t>(kB * kT * heads * c.bytes, uint8_t{0xEE})));
      TensorCopy& tensor = copy.tensors[i];
      tensor.from = reinterpret_cast<const std::byte*>(from[i]->data() + c.at);
      tensor.to = reinterpret_cast<std::byte*>(to[i]->data());
      // The source is [B, H, T], the copy [B, T, H].
      tensor.from_strides = {kT * heads * row, row, kT * row};
      tensor.to_strides = {int64_t{kT} * heads * c.bytes, int64_t{heads} * c.bytes, c.bytes};
      tensor.head_count = heads;
      tensor.bytes = c.bytes;
    }
    Check(LaunchStepCopy(copy, nullptr));
    for (size_t i = 0; i < cases.size(); ++i) {
      const Case& c = cases[i];
      const int heads = copy.tensors[i].head_count;
      const std::vector<uint8_t> there = from[i]->Fetch();
      const std::vector<uint8_t> got = to[i]->Fetch();
      for (int b = 0; b < kB; ++b) {
        for (int t = 0; t < kT; ++t) {
          for (int h = 0; h < heads; ++h) {
            const int64_t at = ((b * kT + t) * heads + h) * int64_t{c.bytes};
            const int64_t source = c.at + ((b * heads + h) * kT + t) * (c.bytes + c.gap);
            ASSERT_TRUE(
                std::equal(got.begin() + at, got.begin() + at + c.bytes, there.begin() + source))
                << "tensor " << i << " of " << c.bytes << " bytes, row " << b << " " << t << " "
                << h;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace spillway::cuda

// Tensors in regions of device memory, which are copied to the host and back.
#include "services/convert/tensor.h"

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/shared_toy.h"

namespace spillway {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class GpuTensorTest : public ::testing::Test {
 protected:
  GpuTensorTest() : session(regions.OpenSession()) {
    region = *regions.AttachGpu(caller, session, 1, "cuda:0");
  }

  // A float32 tensor [2, 3, 4] that begins at `offset`.
  v1::Tensor Tensor(int64_t offset, const std::vector<int64_t>& strides) const {
    v1::Tensor tensor;
    tensor.set_dtype(v1::DTYPE_F32);
    for (const int64_t size : {2, 3, 4}) tensor.add_shape(size);
    v1::RegionSlice& slice = *tensor.mutable_slice();
    slice.set_region("regions/" + region->id);
    slice.set_offset(offset);
    for (const int64_t stride : strides) slice.add_strides(stride);
    return tensor;
  }
  float* At(int64_t offset) const {
    return reinterpret_cast<float*>(region->bytes.data() + offset);
  }
  // The copy that CopyOf makes of the tensor.
  std::vector<float> Copied(const v1::Tensor& tensor) const {
    const absl::StatusOr<TensorView> view =
        ViewTensor(tensor, {2, 3, 4}, CallerRegions(regions, caller), "q");
    EXPECT_TRUE(view.ok()) << view.status();
    const std::array<int64_t, 3> shape = {2, 3, 4};
    const auto copy = CopyOf(*view, shape);
    EXPECT_TRUE(copy.ok()) << copy.status();
    std::vector<float> values(24);
    std::memcpy(values.data(), copy->get(), values.size() * sizeof(float));
    return values;
  }

  MemoryBudget budget{int64_t{64} << 20};
  SharedToy gpu{"cuda:0", "GPU-a"};
  const Caller caller;
  AccountTable accounts;
  RegionTable regions{RegionTable::Kind::kSessions, &budget, &accounts, &gpu};
  const std::string session;
  std::shared_ptr<Region> region;
};

TEST_F(GpuTensorTest, IsReadAsItLies) {
  struct Case {
    std::vector<int64_t> strides;
    int64_t read_count;
  };
  for (const Case& c : {Case{{}, 1},             // C order
                        Case{{48, 16, 4}, 1},    // C order, stated explicitly
                        Case{{192, 64, 4}, 1},   // all rows at equal distances
                        Case{{1024, 32, 4}, 2},  // gaps between the outer slices
                        Case{{16, 32, 4}, 2},    // outer stride smaller than the inner
                        Case{{0, 16, 4}, 2}}) {  // the same outer slice twice
    const int64_t outer = c.strides.empty() ? 48 : c.strides[0];
    const int64_t inner = c.strides.empty() ? 16 : c.strides[1];
    std::vector<float> expected;
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 3; ++j) {
        for (int k = 0; k < 4; ++k) {
          // The value is the offset, since elements may share a place.
          const int64_t offset = 64 + i * outer + j * inner + k * 4;
          *At(offset) = static_cast<float>(offset);
          expected.push_back(static_cast<float>(offset));
        }
      }
    }
    const int64_t before = gpu.read_count();
    EXPECT_EQ(Copied(Tensor(64, c.strides)), expected) << outer << " " << inner;
    EXPECT_EQ(gpu.read_count() - before, c.read_count) << outer << " " << inner;
  }
}

TEST_F(GpuTensorTest, LiesInItWhole) {
  const auto size = static_cast<int64_t>(region->bytes.size());
  EXPECT_TRUE(
      ViewTensor(Tensor(size - 96, {}), {2, 3, 4}, CallerRegions(regions, caller), "q").ok());
  for (const auto& [offset, told] :
       {std::pair(size - 92, "96 bytes from"), std::pair(int64_t{-4}, "value -4"),
        std::pair(int64_t{2}, "value 2"), std::pair(int64_t{1} << 62, "96 bytes from")}) {
    const absl::Status status =
        ViewTensor(Tensor(offset, {}), {2, 3, 4}, CallerRegions(regions, caller), "q").status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr(told));
  }
  const absl::Status huge = ViewTensor(Tensor(0, {0, int64_t{1} << 62, 4}), {2, 3, 4},
                                       CallerRegions(regions, caller), "q")
                                .status();
  EXPECT_THAT(huge.message(), HasSubstr("larger than any memory"));
}

TEST_F(GpuTensorTest, ResultsAreWrittenThere) {
  v1::RegionSlice slice;
  slice.set_region("regions/" + region->id);
  slice.set_offset(256);
  const absl::StatusOr<TensorPlace> place =
      PlaceTensor(slice, 3, DType::kF32, CallerRegions(regions, caller), "out");
  ASSERT_TRUE(place.ok()) << place.status();
  v1::Tensor tensor;
  const std::vector<float> values = {1.5f, -2, 7};
  ASSERT_TRUE(FillTensor(values, DType::kF32, {3}, *place, tensor).ok());
  EXPECT_EQ(gpu.write_count(), 1);
  EXPECT_THAT(std::vector<float>(At(256), At(256) + 3), ElementsAre(1.5f, -2, 7));
  EXPECT_EQ(tensor.slice().offset(), 256);
  EXPECT_TRUE(tensor.data().empty());
}

// In an embedded engine, tensors may have addresses in GPU memory, from which it copies only rows.
TEST_F(GpuTensorTest, AnEmbeddedEnginesGpuIsForRowsAlone) {
  RegionTable process(RegionTable::Kind::kProcess, &budget, &accounts);
  v1::Tensor tensor = Tensor(64, {});
  tensor.mutable_slice()->set_region("regions/gpu");
  const absl::Status status =
      ViewTensor(tensor, {2, 3, 4}, CallerRegions(process, caller), "q").status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("regions/gpu is only for rows"));
  EXPECT_TRUE(
      ViewTensor(tensor, {2, 3, 4}, CallerRegions(process, caller), "k", TensorMemory::kAny).ok());
  EXPECT_THAT(PlaceTensor(tensor.slice(), 3, DType::kF32, CallerRegions(process, caller), "out")
                  .status()
                  .message(),
              HasSubstr("regions/gpu is only for rows"));
}

}  // namespace
}  // namespace spillway

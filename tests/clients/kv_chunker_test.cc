#include "spillway/kv_chunker.h"

#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"

namespace spillway {
namespace {

constexpr int32_t kHeads = 3;
constexpr int32_t kDim = 16;

// Elements `first`, `first` + 1, ... as the bytes of 32-bit numbers.
std::string Numbered(size_t count, uint32_t first) {
  std::vector<uint32_t> elements(count);
  std::iota(elements.begin(), elements.end(), first);
  return {reinterpret_cast<const char*>(elements.data()), count * sizeof(uint32_t)};
}

KvRows MakeRows(int32_t layers, int64_t tokens, const std::string& k, const std::string& v) {
  return {.sequence = "sequences/s",
          .generation = 5,
          .layer_start = 2,
          .layer_count = layers,
          .token_start = 100,
          .token_count = tokens,
          .kv_head_count = kHeads,
          .head_dim = kDim,
          .dtype = v1::DTYPE_F32,
          .k = k,
          .v = v};
}

// Copies a chunk's tensor to its place in the whole tensor.
void Place(const KvRows& rows, const v1::KvChunk& chunk, const v1::Tensor& tensor,
           std::string& whole) {
  const size_t row_bytes = kDim * sizeof(uint32_t);
  ASSERT_EQ(tensor.shape_size(), 4);
  const int64_t layers = tensor.shape(0);
  const int64_t tokens = tensor.shape(2);
  ASSERT_EQ(tensor.shape(1), kHeads);
  ASSERT_EQ(tensor.shape(3), kDim);
  ASSERT_EQ(tensor.data().size(), static_cast<size_t>(layers * kHeads * tokens) * row_bytes);
  size_t from = 0;
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (int64_t head = 0; head < kHeads; ++head) {
      for (int64_t token = 0; token < tokens; ++token, from += row_bytes) {
        const int64_t row =
            ((chunk.layer_start() - rows.layer_start + layer) * kHeads + head) * rows.token_count +
            chunk.token_start() - rows.token_start + token;
        ASSERT_LE(static_cast<size_t>(row + 1) * row_bytes, whole.size());
        whole.replace(static_cast<size_t>(row) * row_bytes, row_bytes, tensor.data(), from,
                      row_bytes);
      }
    }
  }
}

// Layers, tokens, size limit of a message in bytes.
class KvChunkerTest : public ::testing::TestWithParam<std::tuple<int32_t, int64_t, int64_t>> {};

TEST_P(KvChunkerTest, ChunksAreTheRowsAgain) {
  const auto [layers, tokens, bytes_max] = GetParam();
  const size_t count = static_cast<size_t>(layers * kHeads * tokens * kDim);
  const std::string k = Numbered(count, 1);
  const std::string v = Numbered(count, 1'000'000'000);
  const KvRows rows = MakeRows(layers, tokens, k, v);
  auto chunker = KvChunker::Create(rows, bytes_max);
  ASSERT_TRUE(chunker.ok()) << chunker.status();
  std::string seen_k(k.size(), '\0');
  std::string seen_v(v.size(), '\0');
  std::vector<int64_t> layer_lengths(static_cast<size_t>(layers), 0);
  size_t bytes = 0;
  v1::AppendRequest request;
  while (chunker->Next(*request.mutable_chunk())) {
    const v1::KvChunk& chunk = request.chunk();
    EXPECT_LE(request.ByteSizeLong(), static_cast<size_t>(bytes_max));
    EXPECT_EQ(chunk.sequence(), "sequences/s");
    EXPECT_EQ(chunk.generation(), 5);
    // A daemon would accept the chunk: each layer continues at its present length.
    for (int64_t layer = 0; layer < chunk.k().shape(0); ++layer) {
      int64_t& length =
          layer_lengths.at(static_cast<size_t>(chunk.layer_start() - rows.layer_start + layer));
      EXPECT_EQ(chunk.token_start(), rows.token_start + length);
      length += chunk.k().shape(2);
    }
    Place(rows, chunk, chunk.k(), seen_k);
    Place(rows, chunk, chunk.v(), seen_v);
    bytes += chunk.k().data().size() + chunk.v().data().size();
  }
  EXPECT_TRUE(seen_k == k);
  EXPECT_TRUE(seen_v == v);
  EXPECT_EQ(bytes, k.size() + v.size());
}

INSTANTIATE_TEST_SUITE_P(Shapes, KvChunkerTest,
                         ::testing::Values(std::tuple{1, 1, 4096}, std::tuple{30, 1, 8192},
                                           std::tuple{7, 10, 16384}, std::tuple{2, 1000, 8192},
                                           std::tuple{3, 997, 100'000},
                                           std::tuple{5, 64, 4 << 20}));

TEST(KvChunkerErrors, SizesMustFitTheShape) {
  const std::string k = Numbered(kHeads * 4 * kDim, 0);
  const std::string short_v = k.substr(1);
  EXPECT_TRUE(KvChunker::Create(MakeRows(1, 4, k, k), 1 << 20).ok());
  EXPECT_EQ(KvChunker::Create(MakeRows(1, 4, k, short_v), 1 << 20).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(KvChunker::Create(MakeRows(2, 4, k, k), 1 << 20).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(KvChunker::Create(MakeRows(1, 0, "", ""), 1 << 20).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(KvChunkerErrors, AShapeThatOverflowsIsRefused) {
  KvRows rows =
      MakeRows(std::numeric_limits<int32_t>::max(), std::numeric_limits<int64_t>::max(), "", "");
  rows.kv_head_count = std::numeric_limits<int32_t>::max();
  rows.head_dim = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(KvChunker::Create(rows, 4 << 20).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(KvChunkerErrors, ATokenMustFitInAMessage) {
  const std::string k = Numbered(kHeads * kDim, 0);
  EXPECT_EQ(
      KvChunker::Create(MakeRows(1, 1, k, k), 1024 + 2 * kHeads * kDim * 4 - 1).status().code(),
      absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(KvChunker::Create(MakeRows(1, 1, k, k), 1024 + 2 * kHeads * kDim * 4).ok());
}

}  // namespace
}  // namespace spillway

#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <sstream>
#include <string>

#include "gpu/device/block.h"
#include "gpu/device/resident_rows.h"
#include "gpu/device/sequence.h"
#include "gpu/kernels/code_tiling.h"

// What `spillway-lab size` says of GPU memory is what the device takes: both are compared with one
// table. No GPU is needed.
namespace spillway::cuda {
namespace {

struct Line {
  ModelSpec spec;
  int64_t token_count = 0;
  std::string said;  // "page rows statistics tables"
};

Line Parse(const std::string& text) {
  Line line;
  std::string dtype, bar;
  std::istringstream in(text);
  in >> line.spec.kv_head_count >> line.spec.head_dim >> dtype >> line.spec.hash.bits_per_dim >>
      line.spec.hash.value_bits >> line.spec.resident_sample_fraction >> line.token_count >> bar;
  EXPECT_EQ(bar, "|") << text;
  std::getline(in >> std::ws, line.said);
  line.spec.layer_count = 1;
  line.spec.query_head_count = line.spec.kv_head_count;
  line.spec.dtype = dtype == "bf16" ? DType::kBF16 : dtype == "f16" ? DType::kF16 : DType::kF32;
  Normalize(line.spec);
  return line;
}

std::string Taken(const ModelSpec& spec, int64_t token_count) {
  MemoryBudget budget(int64_t{512} << 20);
  const std::unique_ptr<Arena> arena =
      Arena::Create({.limit_bytes = int64_t{256} << 20}, &budget).value();
  BlockPools blocks;
  blocks.SetArena(arena.get());
  PagePool rows(arena.get(), kResidentPageRows * spec.row_bytes());
  ResidentRowsOfLayer resident(spec, &rows, &blocks, /*layer=*/0);
  EXPECT_TRUE(resident.Prepare(token_count).ok());
  const int64_t pages = (token_count + kPageTokenCount - 1) / kPageTokenCount;
  const int64_t tables = LayerIndex::TableBytes(spec, LayerIndex::CapacityFor(pages));
  std::ostringstream out;
  out << CodeTiling::Of(spec).page_bytes() << ' ' << resident.bytes() << ' '
      << blocks.Of(LayerIndex::HeadBytes(spec, /*methods_encode=*/false))->page_bytes() << ' '
      << blocks.Of(tables)->page_bytes();
  return out.str();
}

TEST(LayoutSizes, AreThoseOfTheTable) {
  std::ifstream file(LAYOUT_SIZES);
  int count = 0;
  for (std::string text; std::getline(file, text);) {
    if (text.starts_with('#')) continue;
    const Line line = Parse(text);
    EXPECT_EQ(Taken(line.spec, line.token_count), line.said) << text;
    ++count;
  }
  EXPECT_EQ(count, 9);
}

}  // namespace
}  // namespace spillway::cuda

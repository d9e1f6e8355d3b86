#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <span>
#include <vector>

#include "tests/gpu/coded_layer.h"
#include "tests/gpu/page_reference.h"

// Compares the GPU's page index with the reference, bit by bit.
namespace spillway::cuda {

inline void ExpectStatistics(const HeadStatistics& found, const HeadStatistics& wanted) {
  EXPECT_EQ(found.median_radius, wanted.median_radius);
  EXPECT_EQ(found.value_reference, wanted.value_reference);
  EXPECT_EQ(found.value_unit, wanted.value_unit);
  EXPECT_EQ(found.value_floor, wanted.value_floor);
}

// Compares a code page; it has one plane per bit. keys: the page's; rotation: P [d][d].
inline void ExpectPage(const CodeTiling& tiling, std::vector<std::byte>& page,
                       const reference::Page& wanted, const reference::Vectors& keys,
                       std::span<const float> rotation) {
  const int d = tiling.centre_dims;
  std::vector<float> centre(d);
  ToFloat(DType::kBF16, CentreAddress(tiling, page), d, centre.data());
  for (int i = 0; i < d; ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(centre[i]), std::bit_cast<uint32_t>(wanted.centre[i]))
        << "dimension " << i << ": " << centre[i] << " and not " << wanted.centre[i];
  }
  for (int slot = 0; slot < kPageTokenCount; ++slot) {
    const TokenCode code(tiling, page, slot);
    ASSERT_EQ(code.Norm(), wanted.norms[slot]) << "slot " << slot;
    const reference::KeyCode key =
        reference::CodeOf(keys[slot], wanted.centre, rotation, tiling.planes);
    for (int j = 0; j < tiling.words * 32; ++j) {
      ASSERT_EQ(code.Level(j), j < d ? key.levels[j] : 0) << "slot " << slot << " dimension " << j;
    }
    ASSERT_EQ(code.Factor(), key.factor) << "slot " << slot;
  }
}

}  // namespace spillway::cuda

#pragma once

#include <random>
#include <vector>

#include "host/cpu/kernels.h"
#include "tests/host/cpu/code_page.h"

namespace spillway {

inline constexpr int kKeys = kPageTokenCount;

// A page of random levels and a random quantised query group.
struct ScoreCase {
  int d;
  int bits;
  int group;
  CodePage page;
  std::vector<std::vector<int>> key_levels;    // [key][d]
  std::vector<std::vector<int>> query_levels;  // [head][d], in [-8, 7]
  std::vector<int8_t> weights;
  ScoreQuery query;

  ScoreCase(int d_in, int bits_in, int group_in)
      : d(d_in), bits(bits_in), group(group_in), page(RotationLayout(d, bits)) {
    std::mt19937 random(d * 100 + bits * 20 + group);
    std::uniform_int_distribution<int> key_level(0, (1 << bits) - 1), query_level(-8, 7);
    std::uniform_real_distribution<float> factor(0.5f, 1.5f);
    key_levels.assign(kKeys, std::vector<int>(d));
    for (int t = 0; t < kKeys; ++t) {
      for (int j = 0; j < d; ++j) page.SetLevel(t, j, key_levels[t][j] = key_level(random));
      page.SetFactor(t, factor(random));
    }
    // Extreme cases: all levels lowest, all highest, and a key at the centre.
    for (int j = 0; j < d; ++j) {
      page.SetLevel(5, j, key_levels[5][j] = 0);
      page.SetLevel(6, j, key_levels[6][j] = (1 << bits) - 1);
    }
    page.SetFactor(7, 0);
    query.layout = RotationLayout(d, bits);
    query.row_count = group;
    weights.assign(static_cast<size_t>(group) * query.layout.dims, 0);
    query_levels.assign(group, std::vector<int>(d));
    for (int g = 0; g < group; ++g) {
      int total = 0;
      for (int j = 0; j < d; ++j) {
        const int w = g == 1 ? -8 : g == 2 ? 7 : query_level(random);
        query_levels[g][j] = w;
        total += 2 * w + 1;
        weights[g * query.layout.dims + j] = static_cast<int8_t>(2 * (2 * w + 1));
      }
      query.offset[g] = -((1 << bits) - 1) * total;
      query.coefficient[g] = 1;
    }
    query.weights = weights.data();
  }
};

}  // namespace spillway

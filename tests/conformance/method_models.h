// Models with indices of the keys in addition to the codes.
#pragma once

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/conformance/device_bench.h"
#include "tests/host/methods/weights/safetensors_file.h"

namespace spillway {

// A model, and the weights file with the label channels that its spec asks for.
struct IndexedModel {
  ModelSpec spec;
  std::vector<std::vector<int>> channels;  // [H_kv][label_channel_count]
  std::vector<std::byte> file;

  // Makes a valid model. Its label channels are chosen and ordered at random.
  IndexedModel(int kv_head_count, int group, int head_dim, DType dtype, const KeyIndexSpec& indices,
               HashSpec hash = {})
      : spec(MakeSpec(kv_head_count, group, head_dim, dtype, hash)) {
    spec.indices = indices;
    Normalize(spec);
    std::mt19937 random(head_dim + 7 * indices.label_channel_count);
    std::vector<int32_t> all;
    for (int h = 0; h < kv_head_count; ++h) {
      std::vector<int>& chosen = channels.emplace_back(head_dim);
      std::iota(chosen.begin(), chosen.end(), 0);
      std::shuffle(chosen.begin(), chosen.end(), random);
      chosen.resize(indices.label_channel_count);
      all.insert(all.end(), chosen.begin(), chosen.end());
    }
    if (indices.label_channel_count == 0) return;
    SafeTensorsWriter writer;
    writer.AddIntegers("layers.0.channels", {kv_head_count, indices.label_channel_count}, all);
    file = writer.File();
  }
};

// All indices that the methods of this build read.
inline KeyIndexSpec EveryIndex(int quest_page_token_count = 32) {
  KeyIndexSpec indices;
  indices.int4_keys = HasMethodOf("key_indices.int4_keys");
  if (HasMethodOf("key_indices.quest_page_token_count")) {
    indices.quest_page_token_count = quest_page_token_count;
  }
  if (HasMethodOf("key_indices.label_channel_count")) indices.label_channel_count = 16;
  if (HasMethodOf("key_indices.lsh_table_count")) {
    indices.lsh_table_count = 40;
    indices.lsh_bits = 6;
    indices.lsh_seed = 9;
  }
  return indices;
}

}  // namespace spillway

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/model.h"
#include "host/memory/sequence_record.h"

namespace spillway {

// Finds the prefixes that sequences of a store share: forks refer to the same pages until one side
// writes. Not thread-safe.
class SharedPrefixes {
 public:
  struct Prefix {
    size_t source = 0;        // index in the order of Add()
    int64_t token_count = 0;  // whole pages of every layer
  };

  // Adds a sequence. Returns the earlier one with the longest common prefix, or nothing if they
  // share no page. The record must not change while others are added.
  std::optional<Prefix> Add(const Model& model, SequenceRecord& record);

 private:
  // Only so many forks of a sequence, the last ones, are compared, so that many forks cost little.
  static constexpr size_t kLookedAtMax = 64;

  std::vector<SequenceRecord*> records_;
  // Indices into records_, by model and first page of layer 0 and KV head 0.
  absl::flat_hash_map<std::pair<const Model*, uint32_t>, std::vector<size_t>> families_;
};

}  // namespace spillway

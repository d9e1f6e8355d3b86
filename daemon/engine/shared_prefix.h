#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "daemon/engine/model.h"
#include "host/memory/sequence_record.h"

namespace spillway {

// Finds what sequences of a store have in common: forks list the same pages until one side
// writes. Not thread-safe.
class SharedPrefixes {
 public:
  struct Prefix {
    size_t source = 0;        // counted in the order of Add()
    int64_t token_count = 0;  // whole pages of every layer
  };

  // Adds a sequence, and tells which of those before it has the longest beginning in common with
  // it; none where no page is. The record stays as it is for as long as others are added.
  std::optional<Prefix> Add(const Model& model, SequenceRecord& record);

 private:
  // Of forks of one sequence the last ones are looked at, so that many cost little.
  static constexpr size_t kLookedAtMax = 64;

  std::vector<SequenceRecord*> records_;
  // By the first page of all.
  absl::flat_hash_map<std::pair<const Model*, uint32_t>, std::vector<size_t>> families_;
};

}  // namespace spillway

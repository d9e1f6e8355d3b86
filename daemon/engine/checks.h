// What a request must keep; nothing here changes any state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/engine/requests.h"

namespace spillway {

// The error with reason NON_FINITE and the field that it is of.
absl::Status NonFinite(const absl::Status& error, std::string_view field);
// OUT_OF_RANGE, reason NON_FINITE, naming layer, KV head, token position and
// element of the first value of K or V that is infinite or NaN. path: of the
// chunk in its request, "chunk.".
absl::Status CheckFinite(const Chunk& chunk, const ModelSpec& spec, const std::string& path);
// The same for queries [T, H_q, d] of a field, naming query, head and element.
absl::Status CheckFinite(const AttendQuery& attend, const ModelSpec& spec, std::string_view field);

// Whether the chunk follows the layer's rows (true) or repeats rows that are
// there with equal bytes (false). `offset`: which of the chunk's layers.
// OUT_OF_RANGE for a gap or a straddle, ALREADY_EXISTS for other bytes, both
// with the layer's length.
absl::StatusOr<bool> IsAppend(const Chunk& chunk, int offset, const LayerRows& rows);
// INVALID_ARGUMENT for a decode step of no sequences or too many, or of too many
// new tokens.
absl::Status CheckStep(size_t part_count, int64_t token_count);

// What the sequences of one request are to each other.
class OneModel {
 public:
  // INVALID_ARGUMENT, naming the field, for a sequence of another model than the
  // first, or one that came before.
  absl::Status Add(const Sequence& sequence, const std::string& field);

 private:
  const Model* model_ = nullptr;
  std::unordered_set<const Sequence*> seen_;
};

// INVALID_ARGUMENT where a tensor, `field` in its request, lies in the memory of another
// GPU than the one that the sequence lives on.
absl::Status CheckHome(const Device& gpu, const Device& home, const Sequence& sequence,
                       const std::string& field);

// ABORTED, reason STALE_GENERATION.
absl::Status CheckGeneration(int64_t generation, const Sequence& sequence);

// Fills in causal visibility, or checks what is given, against the layer's
// length n after the append. OUT_OF_RANGE with the length.
absl::Status ResolveVisible(int64_t layer_token_count, AttendQuery& attend);

}  // namespace spillway

// Checks of requests. They change no state of the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/requests.h"

namespace spillway {

// Adds reason NON_FINITE and the field to the error.
absl::Status NonFinite(const absl::Status& error, std::string_view field);
// OUT_OF_RANGE, reason NON_FINITE, if an element of K or V is infinite or NaN. The error names
// layer, KV head, token position and element of the first one. path: of the chunk in its request,
// such as "chunk.".
absl::Status CheckFinite(const Chunk& chunk, const ModelSpec& spec, const std::string& path);
// The same for the queries [T, H_q, d] in `field`. The error names query, query head and element.
absl::Status CheckFinite(const AttendQuery& attend, const ModelSpec& spec, std::string_view field);

// Whether the chunk follows the layer's rows (true), or repeats rows that are there with equal
// bytes (false). `offset`: index of the layer within the chunk. OUT_OF_RANGE for a gap, a partial
// overlap or too many tokens, ALREADY_EXISTS for different bytes; both with the layer's length.
absl::StatusOr<bool> IsAppend(const Chunk& chunk, int offset, const LayerRows& rows);
// INVALID_ARGUMENT for a decode step with no sequences or too many, or with no new tokens or too
// many.
absl::Status CheckStep(size_t part_count, int64_t token_count);

// Checks that the sequences of one request are distinct and of one model.
class OneModel {
 public:
  // INVALID_ARGUMENT, naming the field, if the sequence was added before, or is of another model
  // than the first one.
  absl::Status Add(const Sequence& sequence, const std::string& field);

 private:
  const Model* model_ = nullptr;
  std::unordered_set<const Sequence*> seen_;
};

// INVALID_ARGUMENT if a tensor, `field` in its request, is in the memory of another GPU than the
// one on which the sequence lives.
absl::Status CheckHome(const Device& gpu, const Device& home, const Sequence& sequence,
                       const std::string& field);

// ABORTED, reason STALE_GENERATION.
absl::Status CheckGeneration(int64_t generation, const Sequence& sequence);

// Fills in causal visibility if attend.visible is empty, else checks it, against the layer's length
// after the append. OUT_OF_RANGE with the length.
absl::Status ResolveVisible(int64_t layer_token_count, AttendQuery& attend);

}  // namespace spillway

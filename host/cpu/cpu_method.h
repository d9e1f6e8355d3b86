#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "host/cpu/key_index.h"
#include "host/cpu/key_scorer.h"
#include "host/cpu/method_tail.h"
#include "host/cpu/score_pass.h"
#include "host/policy/method.h"

namespace spillway {

// How the CPU device runs an optional method. Functions that the method does not have are null.
struct CpuMethod {
  // Bytes of the method's section of an index page, which holds kPageTokenCount keys of one KV
  // head; 0 for a model that does not ask for it.
  int64_t (*section_bytes)(const ModelSpec&) = nullptr;
  // Upper limit on KeyIndex::bytes() of a model, before the index is made.
  int64_t (*weight_bytes)(const ModelSpec&) = nullptr;
  // For a model that asks for the section. safetensors: the model's weights, not kept.
  // INVALID_ARGUMENT names the tensor that is missing or has a wrong shape. A method that computes
  // for long checks cancel, which may be null, for every layer; after a cancellation, the result is
  // not used.
  absl::StatusOr<std::unique_ptr<KeyIndex>> (*make_index)(const ModelSpec& spec,
                                                          std::span<const std::byte> safetensors,
                                                          const CancelToken* cancel) = nullptr;
  // For a selector. The scorer keeps the pointers of `keys`.
  std::unique_ptr<KeyScorer> (*make_scorer)(const ScoredKeys& keys) = nullptr;
  // For a first selection: a scorer that scores like `second`, but only the tokens that the
  // policy's first selection finds.
  std::unique_ptr<KeyScorer> (*make_first_selection)(const ScoredKeys& keys,
                                                     std::unique_ptr<KeyScorer> second) = nullptr;
  // For a tail, among the tokens that `scores` has not marked as heavy. The arguments must outlive
  // the result.
  std::unique_ptr<MethodTail> (*make_tail)(const ScoredKeys& keys,
                                           const ScorePass& scores) = nullptr;
};

// The optional method that has the selector, the tail, or first selections; null if none has.
// Thread-safe.
const CpuMethod* FindCpuMethod(Selector selector);
const CpuMethod* FindCpuMethod(Tail tail);
const CpuMethod* FindFirstSelection();

}  // namespace spillway

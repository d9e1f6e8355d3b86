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

// How the CPU device runs an optional method. What a method does not bring is
// null.
struct CpuMethod {
  // Bytes of its section of an index page, which holds kPageTokenCount keys of
  // one KV head; 0 of a model that does not ask for it.
  int64_t (*section_bytes)(const ModelSpec&) = nullptr;
  // What KeyIndex::bytes() of a model's is at most, before it is made.
  int64_t (*weight_bytes)(const ModelSpec&) = nullptr;
  // Of a model that asks for the section. safetensors: the model's weights, not
  // kept. INVALID_ARGUMENT names the tensor that is missing or misshapen. One that computes for
  // long looks at cancel, which may be null, for every layer; what it makes then is not used.
  absl::StatusOr<std::unique_ptr<KeyIndex>> (*make_index)(const ModelSpec& spec,
                                                          std::span<const std::byte> safetensors,
                                                          const CancelToken* cancel) = nullptr;
  // A selector's. The scorer keeps the keys' pointers.
  std::unique_ptr<KeyScorer> (*make_scorer)(const ScoredKeys& keys) = nullptr;
  // A first selection's: scores as `second` does what the policy's first
  // selection finds, and nothing else.
  std::unique_ptr<KeyScorer> (*make_first_selection)(const ScoredKeys& keys,
                                                     std::unique_ptr<KeyScorer> second) = nullptr;
  // A tail's, of the tokens that `scores` has not called heavy. All that it is
  // given outlives it.
  std::unique_ptr<MethodTail> (*make_tail)(const ScoredKeys& keys,
                                           const ScorePass& scores) = nullptr;
};

// The optional method that brings a selector, a tail, or first selections;
// null: none does. Thread-safe.
const CpuMethod* FindCpuMethod(Selector selector);
const CpuMethod* FindCpuMethod(Tail tail);
const CpuMethod* FindFirstSelection();

}  // namespace spillway

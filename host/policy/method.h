#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "host/base/dtype.h"
#include "host/core/selector.h"
#include "host/core/tail.h"
#include "host/model/model_spec.h"

// The properties of the methods that a policy may name.
namespace spillway {

// The quantity by which a selector ranks keys.
enum class RankedBy : uint8_t {
  kNothing,
  kExactLogit,
  kEstimatedLogit,
  kLogitBound,
  kMatchingBits
};

struct SelectorMethod {
  Selector selector;
  std::string_view name;   // "asymmetric" for SELECTOR_ASYMMETRIC
  std::string_view needs;  // what a model must have, for messages; empty: nothing
  bool (*is_served)(const ModelSpec&);
  RankedBy ranked_by;
  // Bits of the index that the selector reads per key of one KV head, on average.
  int64_t (*key_bits)(const ModelSpec&);
  // Number of visible tokens up to which the ranks are good enough for an error bound: about twice
  // the longest context for which this was measured (docs/adr/0018). 0: never.
  int64_t (*guaranteed_token_count)(const ModelSpec&);
  // Whether the selector ranks by the page index of a model with a rotation
  // (host/core/page_index.h). Then open pages are attended exactly.
  bool reads_page_index;
  // The default selector of a model is the one with the lowest number among those that support the
  // model; 0: never a default.
  int default_order;

  constexpr bool estimates_logits() const { return ranked_by != RankedBy::kMatchingBits; }
};

struct TailMethod {
  Tail tail;
  std::string_view name;
  std::string_view needs;
  bool (*is_served)(const ModelSpec&);
  // Whether row_count_max can limit its rows.
  bool limited;
  // Whether each query head takes its own rows, with its own weights. A selection, which has one
  // list per KV head, cannot express that.
  bool per_query_head;
};

struct CpuMethod;  // host/cpu/cpu_method.h

// An optional method: what a folder under host/methods provides. Parts that it does not provide are
// null or empty.
struct Method {
  const SelectorMethod* selector = nullptr;
  const TailMethod* tail = nullptr;
  // Whether this method runs first selections (the policy's candidates).
  bool is_first_selection = false;
  // Fields of a model that only this method reads, by their names in the API
  // ("key_indices.int4_keys").
  std::span<const std::string_view> model_fields = {};
  const CpuMethod* cpu = nullptr;
};

// The optional methods of this build, in the order of their sections in an index page.
// host/methods/registry.cc lists them. Thread-safe.
std::span<const Method* const> OptionalMethods();

// Functions for SelectorMethod and TailMethod.
namespace methods {

inline constexpr int64_t kAnyLength = INT64_MAX;
constexpr bool Always(const ModelSpec&) { return true; }
constexpr int64_t None(const ModelSpec&) { return 0; }
constexpr int64_t Any(const ModelSpec&) { return kAnyLength; }

}  // namespace methods

}  // namespace spillway

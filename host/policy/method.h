#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "host/base/dtype.h"
#include "host/core/selector.h"
#include "host/core/tail.h"
#include "host/model/model_spec.h"

// What is said of a method that a policy may name.
namespace spillway {

// What it ranks keys by.
enum class RankedBy : uint8_t {
  kNothing,
  kExactLogit,
  kEstimatedLogit,
  kLogitBound,
  kMatchingBits
};

struct SelectorMethod {
  Selector selector;
  std::string_view name;   // SELECTOR_ASYMMETRIC is "asymmetric"
  std::string_view needs;  // of a model, for messages; empty: nothing
  bool (*is_served)(const ModelSpec&);
  RankedBy ranked_by;
  // Bits of the index that it reads of one key of one KV head, on average.
  int64_t (*key_bits)(const ModelSpec&);
  // Visible tokens up to which promises on its ranks were found to be kept
  // (docs/adr/0018); 0: never.
  int64_t (*guaranteed_token_count)(const ModelSpec&);
  // Whether it ranks by the page index of a model with a rotation
  // (host/core/page_index.h): then open pages are attended exactly.
  bool reads_page_index;
  // The default of a model is the one with the least that the model serves; 0:
  // never.
  int default_order;

  constexpr bool estimates_logits() const { return ranked_by != RankedBy::kMatchingBits; }
};

struct TailMethod {
  Tail tail;
  std::string_view name;
  std::string_view needs;
  bool (*is_served)(const ModelSpec&);
  // Whether its rows are limited by row_count_max.
  bool limited;
  // Whether each query head takes rows of its own and weighs them, which no
  // selection can say.
  bool per_query_head;
};

struct CpuMethod;  // host/cpu/cpu_method.h

// An optional method: what its folder under host/methods brings. What it
// does not bring is null, or empty.
struct Method {
  const SelectorMethod* selector = nullptr;
  const TailMethod* tail = nullptr;
  // Whether it runs a policy's first selection (candidates).
  bool is_first_selection = false;
  // Fields of a model that it alone reads, as the API spells them
  // ("key_indices.int4_keys").
  std::span<const std::string_view> model_fields = {};
  const CpuMethod* cpu = nullptr;
};

// This build's optional methods, in the order in which index pages hold what
// they keep of keys. host/methods/registry.cc lists them. Thread-safe.
std::span<const Method* const> OptionalMethods();

// Functions for rows.
namespace methods {

inline constexpr int64_t kAnyLength = INT64_MAX;
constexpr bool Always(const ModelSpec&) { return true; }
constexpr int64_t None(const ModelSpec&) { return 0; }
constexpr int64_t Any(const ModelSpec&) { return kAnyLength; }

}  // namespace methods

}  // namespace spillway

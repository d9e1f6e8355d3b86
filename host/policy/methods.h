#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "host/core/selector.h"
#include "host/core/tail.h"
#include "host/model/model_spec.h"

// The methods that a policy may name, a row each. Whatever asks which there are,
// what one needs or what it is good for asks these tables.
namespace spillway {

// What a selector reads of a key in place of its row.
enum class KeyEncoding : uint8_t { kRow, kCode, kSketch, kPageBounds, kLabels };
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
  KeyEncoding encoding;
  RankedBy ranked_by;
  // Bits of the index that it reads of one key of one KV head, on average.
  int64_t (*key_bits)(const ModelSpec&);
  // Visible tokens up to which promises on its ranks were found to be kept
  // (docs/adr/0018); 0: never.
  int64_t (*guaranteed_token_count)(const ModelSpec&);
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
};

namespace methods {

inline constexpr int64_t kAnyLength = INT64_MAX;
constexpr bool Always(const ModelSpec&) { return true; }
constexpr int64_t None(const ModelSpec&) { return 0; }
constexpr int64_t Any(const ModelSpec&) { return kAnyLength; }
// Of estimates from so many bits a dimension.
constexpr int64_t GuaranteedByBits(int bits_per_dim) {
  return bits_per_dim >= 3 ? int64_t{1} << 18 : bits_per_dim == 2 ? int64_t{1} << 16 : 0;
}
// Elements of 4 bits and their range.
constexpr int64_t SketchBits(int channel_count) { return 4 * channel_count + 32; }

}  // namespace methods

// In the enum's order.
inline constexpr std::array kSelectorMethods = {
    SelectorMethod{
        Selector::kAsymmetric, "asymmetric", "a model with a rotation",
        [](const ModelSpec& spec) { return spec.hash.kind == HashKind::kRotation; },
        KeyEncoding::kCode, RankedBy::kEstimatedLogit,
        [](const ModelSpec& spec) -> int64_t {
          return int64_t{32} * spec.plane_words() * spec.plane_count() + 16;
        },
        [](const ModelSpec& spec) { return methods::GuaranteedByBits(spec.hash.bits_per_dim); }, 1},
    SelectorMethod{
        Selector::kHamming, "hamming", "a model with a rotation or an MLP",
        [](const ModelSpec& spec) { return spec.hash.kind != HashKind::kNone; }, KeyEncoding::kCode,
        RankedBy::kMatchingBits,
        [](const ModelSpec& spec) -> int64_t { return int64_t{32} * spec.plane_words(); },
        methods::None, 2},
    SelectorMethod{Selector::kOracle, "oracle", "", methods::Always, KeyEncoding::kRow,
                   RankedBy::kExactLogit,
                   [](const ModelSpec& spec) -> int64_t {
                     return int64_t{8} * spec.head_dim * DTypeBytes(spec.dtype);
                   },
                   methods::Any, 0},
    SelectorMethod{Selector::kAll, "all", "", methods::Always, KeyEncoding::kRow,
                   RankedBy::kNothing, methods::None, methods::Any, 6},
    SelectorMethod{Selector::kSketch, "sketch", "a model with key_indices.sketch",
                   [](const ModelSpec& spec) { return spec.indices.sketch; }, KeyEncoding::kSketch,
                   RankedBy::kEstimatedLogit,
                   [](const ModelSpec& spec) { return methods::SketchBits(spec.head_dim); },
                   [](const ModelSpec&) { return methods::GuaranteedByBits(4); }, 3},
    SelectorMethod{Selector::kQuest, "quest", "a model with key_indices.quest_page_token_count",
                   [](const ModelSpec& spec) { return spec.indices.quest_page_token_count > 0; },
                   KeyEncoding::kPageBounds, RankedBy::kLogitBound,
                   [](const ModelSpec& spec) -> int64_t {
                     return int64_t{16} * spec.head_dim * DTypeBytes(spec.dtype) /
                            spec.indices.quest_page_token_count;
                   },
                   methods::None, 5},
    SelectorMethod{
        Selector::kDoubleSparsity, "double_sparsity",
        "a model with key_indices.label_channel_count",
        [](const ModelSpec& spec) { return spec.indices.label_channel_count > 0; },
        KeyEncoding::kLabels, RankedBy::kEstimatedLogit,
        [](const ModelSpec& spec) { return methods::SketchBits(spec.indices.label_channel_count); },
        methods::None, 4}};

inline constexpr std::array kTailMethods = {
    TailMethod{Tail::kNone, "none", "", methods::Always, true},
    TailMethod{Tail::kUniform, "uniform", "", methods::Always, true},
    TailMethod{Tail::kStratified, "stratified", "", methods::Always, true},
    TailMethod{Tail::kLshSampling, "lsh_sampling", "a model with key_indices.lsh_table_count",
               [](const ModelSpec& spec) { return spec.indices.lsh_table_count > 0; }, false}};

// The row of a value, or null of one that there is not.
template <typename Method, size_t kCount, typename Value>
constexpr const Method* FindMethod(const std::array<Method, kCount>& table, Value value) {
  const auto at = static_cast<size_t>(value);
  return at < kCount ? &table[at] : nullptr;
}
// REQUIRES: there is such a value.
constexpr const SelectorMethod& MethodOf(Selector selector) {
  return kSelectorMethods[static_cast<size_t>(selector)];
}
constexpr const TailMethod& MethodOf(Tail tail) { return kTailMethods[static_cast<size_t>(tail)]; }

}  // namespace spillway

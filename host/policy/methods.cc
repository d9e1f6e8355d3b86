#include "host/policy/methods.h"

#include <algorithm>
#include <cassert>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "host/base/limits.h"

namespace spillway {
namespace {

constexpr SelectorMethod kCoreSelectors[] = {
    {Selector::kAsymmetric, "asymmetric", "a model with a rotation",
     [](const ModelSpec& spec) { return spec.hash.kind == HashKind::kRotation; },
     RankedBy::kEstimatedLogit,
     [](const ModelSpec& spec) -> int64_t {
       // Code, factor, norm, and the key's share of the page's centre.
       return int64_t{32} * spec.plane_words() * spec.plane_count() + 16 + 8 +
              16 * spec.head_dim / kPageTokenCount;
     },
     // From 3 bits on, there is no limit of length: the error of the ranks decides (rank_error.h).
     [](const ModelSpec& spec) -> int64_t {
       const int bits = spec.hash.bits_per_dim;
       return bits >= 3 ? methods::kAnyLength : bits == 2 ? 65536 : 0;
     },
     true, 1},
    {Selector::kOracle, "oracle", "", methods::Always, RankedBy::kExactLogit,
     [](const ModelSpec& spec) -> int64_t {
       return int64_t{8} * spec.head_dim * DTypeBytes(spec.dtype);
     },
     methods::Any, true, 0},
    {Selector::kAll, "all", "", methods::Always, RankedBy::kNothing, methods::None, methods::Any,
     false, 6}};

constexpr TailMethod kCoreTails[] = {
    {Tail::kNone, "none", "", methods::Always, true, false},
    {Tail::kUniform, "uniform", "", methods::Always, true, false},
    {Tail::kStratified, "stratified", "", methods::Always, true, false}};

// The methods of the core and the optional methods, sorted by the member `value`.
template <typename Row, typename Value>
std::vector<const Row*> Rows(std::span<const Row> core, const Row* Method::*of_method,
                             Value Row::*value) {
  std::vector<const Row*> rows;
  for (const Row& row : core) rows.push_back(&row);
  for (const Method* method : OptionalMethods()) {
    if (method->*of_method != nullptr) rows.push_back(method->*of_method);
  }
  std::sort(rows.begin(), rows.end(),
            [&](const Row* a, const Row* b) { return a->*value < b->*value; });
  return rows;
}

template <typename Row, typename Value>
const Row* Find(std::span<const Row* const> rows, Value Row::*of_row, Value value) {
  const auto found =
      std::find_if(rows.begin(), rows.end(), [&](const Row* row) { return row->*of_row == value; });
  return found == rows.end() ? nullptr : *found;
}

template <typename Value>
std::string ApiNameOf(std::string_view prefix, Value value) {
  const auto* method = FindMethod(value);
  return absl::StrCat(std::string(prefix), method != nullptr
                                               ? absl::AsciiStrToUpper(std::string(method->name))
                                               : absl::StrCat(static_cast<int>(value)));
}

}  // namespace

std::span<const SelectorMethod* const> SelectorMethods() {
  static const std::vector<const SelectorMethod*> rows =
      Rows<SelectorMethod>(kCoreSelectors, &Method::selector, &SelectorMethod::selector);
  return rows;
}

std::span<const TailMethod* const> TailMethods() {
  static const std::vector<const TailMethod*> rows =
      Rows<TailMethod>(kCoreTails, &Method::tail, &TailMethod::tail);
  return rows;
}

const SelectorMethod* FindMethod(Selector selector) {
  return Find(SelectorMethods(), &SelectorMethod::selector, selector);
}

const TailMethod* FindMethod(Tail tail) { return Find(TailMethods(), &TailMethod::tail, tail); }

const SelectorMethod& MethodOf(Selector selector) {
  const SelectorMethod* method = FindMethod(selector);
  assert(method != nullptr);
  return *method;
}

const TailMethod& MethodOf(Tail tail) {
  const TailMethod* method = FindMethod(tail);
  assert(method != nullptr);
  return *method;
}

std::string ApiName(Selector selector) { return ApiNameOf("SELECTOR_", selector); }
std::string ApiName(Tail tail) { return ApiNameOf("TAIL_", tail); }

bool HasFirstSelection() {
  const std::span<const Method* const> methods = OptionalMethods();
  return std::any_of(methods.begin(), methods.end(),
                     [](const Method* method) { return method->is_first_selection; });
}

bool HasMethodOf(std::string_view model_field) {
  for (const Method* method : OptionalMethods()) {
    for (const std::string_view field : method->model_fields) {
      if (field == model_field) return true;
    }
  }
  return false;
}

}  // namespace spillway

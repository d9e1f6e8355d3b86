#include "services/fetch_choice.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>

#include "absl/strings/str_cat.h"
#include "engine/errors.h"
#include "host/base/limits.h"

namespace spillway {
namespace {

absl::StatusOr<FetchChoice> RangeFromProto(const v1::TokenRange& tokens) {
  FetchChoice choice;
  choice.start = tokens.start();
  choice.count = tokens.count();
  if (choice.start < 0 || choice.start > kTokenCountMax) {
    return InvalidField("tokens.start", absl::StrCat("value ", choice.start, " is not in [0, ",
                                                     kTokenCountMax, "]"));
  }
  if (choice.count < 1 || choice.count > kTokenCountMax - choice.start) {
    return InvalidField("tokens.count", absl::StrCat("value ", choice.count, " is not in [1, ",
                                                     kTokenCountMax - choice.start,
                                                     "], from token ", choice.start, " on"));
  }
  return choice;
}

absl::StatusOr<FetchChoice> SelectionFromProto(const v1::Selection& selection,
                                               const ModelSpec& spec) {
  const int groups = spec.group_count();
  if (selection.offsets_size() != groups + 1 || selection.offsets(0) != 0) {
    return InvalidField("selection.offsets",
                        absl::StrCat("are not ", groups + 1, " values from 0"));
  }
  const v1::Tensor& tensor = selection.indices();
  const int64_t count = selection.offsets(groups);
  if (tensor.dtype() != v1::DTYPE_U32) {
    return InvalidField("selection.indices.dtype", "is not DTYPE_U32");
  }
  if (tensor.shape_size() != 1 || tensor.shape(0) != count) {
    return InvalidField("selection.indices.shape",
                        absl::StrCat("is not [", count, "], the last offset"));
  }
  // Divides, because count * 4 may overflow.
  if (tensor.data().size() % sizeof(uint32_t) != 0 ||
      static_cast<int64_t>(tensor.data().size() / sizeof(uint32_t)) != count) {
    return InvalidField("selection.indices.data",
                        absl::StrCat(tensor.data().size(), " bytes for ", count, " indices"));
  }
  FetchChoice choice;
  choice.lists.emplace(spec.kv_head_count);
  for (int g = 0; g < groups; ++g) {
    const int64_t begin = selection.offsets(g);
    const int64_t end = selection.offsets(g + 1);
    if (end < begin || end > count) {
      return InvalidField(absl::StrCat("selection.offsets[", g + 1, "]"),
                          absl::StrCat("value ", end, " is not in [", begin, ", ", count, "]"));
    }
    const int h = spec.KvHeadOf(g);
    std::vector<uint32_t>& list = (*choice.lists)[h];
    list.resize(list.size() + static_cast<size_t>(end - begin));
    const std::span<uint32_t> indices = std::span(list).last(static_cast<size_t>(end - begin));
    if (indices.empty()) continue;
    std::memcpy(indices.data(), tensor.data().data() + begin * sizeof(uint32_t),
                indices.size_bytes());
    for (size_t i = 1; i < indices.size(); ++i) {
      if (indices[i] > indices[i - 1]) continue;
      return InvalidField("selection.indices",
                          absl::StrCat("KV head ", h, ": ", indices[i], " after ", indices[i - 1],
                                       " is not ascending"));
    }
  }
  return choice;
}

absl::Status TokenOutOfRange(const std::string& what, int64_t token, int64_t length) {
  return WithReason(absl::OutOfRangeError(absl::StrCat(
                        what, ": token ", token, " is not below the layer's length ", length)),
                    Reason::kTokenOutOfRange, {{"layer_token_count", absl::StrCat(length)}});
}

}  // namespace

absl::StatusOr<FetchChoice> ChoiceFromProto(const v1::FetchPagesRequest& request,
                                            const ModelSpec& spec) {
  if (request.has_selection() && request.has_tokens()) {
    return InvalidField("tokens", "selection is set too: set only one of them");
  }
  if (!request.has_selection() && !request.has_tokens()) {
    return InvalidField("tokens", "is not set, and selection is not either: set one of them");
  }
  return request.has_tokens() ? RangeFromProto(request.tokens())
                              : SelectionFromProto(request.selection(), spec);
}

absl::Status CheckTokens(const FetchChoice& choice, int64_t layer_token_count) {
  if (!choice.lists) {
    const int64_t last = choice.start + choice.count - 1;
    if (last < layer_token_count) return absl::OkStatus();
    return TokenOutOfRange("tokens", last, layer_token_count);
  }
  for (size_t h = 0; h < choice.lists->size(); ++h) {
    const std::vector<uint32_t>& indices = (*choice.lists)[h];
    // The lists of several groups follow each other.
    const auto last = std::ranges::max_element(indices);
    if (last == indices.end() || *last < layer_token_count) continue;
    return TokenOutOfRange(absl::StrCat("selection.indices: KV head ", h), *last,
                           layer_token_count);
  }
  return absl::OkStatus();
}

}  // namespace spillway

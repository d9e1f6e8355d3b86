#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/base/selection.h"
#include "host/model/model_spec.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

// The rows of a FetchPages: of every KV head a run of tokens, or a list.
struct FetchChoice {
  // Of every KV head; not looked at with lists.
  int64_t start = 0;
  int64_t count = 0;
  // [H_kv]; log-weights and strata where the daemon chose.
  std::optional<std::vector<Selection>> lists;

  int64_t CountOf(size_t kv_head) const {
    return lists ? static_cast<int64_t>((*lists)[kv_head].indices.size()) : count;
  }
  uint32_t Token(size_t kv_head, int64_t i) const {
    return lists ? (*lists)[kv_head].indices[i] : static_cast<uint32_t>(start + i);
  }
};

// The client's own choice, tokens or a selection, checked in all but what needs the
// layer's length. INVALID_ARGUMENT names the field.
absl::StatusOr<FetchChoice> ChoiceFromProto(const v1::FetchPagesRequest& request,
                                            const ModelSpec& spec);
// OUT_OF_RANGE, reason TOKEN_OUT_OF_RANGE, for tokens that the layer has not.
absl::Status CheckTokens(const FetchChoice& choice, int64_t layer_token_count);

}  // namespace spillway

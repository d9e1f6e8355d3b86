#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/model/model_spec.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

// The rows of a FetchPages call: the same range of tokens for every KV head, or a list per KV head.
struct FetchChoice {
  // The range, for every KV head; not used if there are lists.
  int64_t start = 0;
  int64_t count = 0;
  // [H_kv]: for each group of the KV head, its tokens in ascending order.
  std::optional<std::vector<std::vector<uint32_t>>> lists;

  int64_t CountOf(size_t kv_head) const {
    return lists ? static_cast<int64_t>((*lists)[kv_head].size()) : count;
  }
  uint32_t Token(size_t kv_head, int64_t i) const {
    return lists ? (*lists)[kv_head][i] : static_cast<uint32_t>(start + i);
  }
};

// The rows of a request: tokens or a selection. Checks everything that does not need the length of
// the layer. INVALID_ARGUMENT names the field.
absl::StatusOr<FetchChoice> ChoiceFromProto(const v1::FetchPagesRequest& request,
                                            const ModelSpec& spec);
// OUT_OF_RANGE, reason TOKEN_OUT_OF_RANGE, for tokens beyond the length of the layer.
absl::Status CheckTokens(const FetchChoice& choice, int64_t layer_token_count);

}  // namespace spillway

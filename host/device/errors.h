#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace spillway {

// The error of every device if the logit q.k of a row that it reads is not finite.
inline absl::Status NonFiniteLogitError(int64_t token, int layer, int kv_head) {
  return absl::OutOfRangeError(absl::StrCat("the logit of token ", token, " at layer ", layer,
                                            ", KV head ", kv_head,
                                            " is not finite: q.k exceeds the range of float32"));
}

inline absl::Status NonFiniteOutputError(int64_t query, int64_t query_head, int layer) {
  return absl::OutOfRangeError(
      absl::StrCat("the output of query ", query, ", query head ", query_head, " at layer ", layer,
                   " is not finite: sums of its values exceed the range of float32"));
}

// For a row of an append. what: "K" or "V".
inline absl::Status NonFiniteRowError(const char* what, int64_t layer, int64_t kv_head,
                                      uint64_t token, int64_t element) {
  return absl::OutOfRangeError(absl::StrCat(what, " is not finite at layer ", layer, ", KV head ",
                                            kv_head, ", token ", token, ", element ", element));
}

}  // namespace spillway

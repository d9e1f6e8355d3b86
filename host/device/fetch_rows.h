#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "host/device/cancel.h"
#include "host/memory/layer_rows.h"

namespace spillway {

// Rows of one layer to be copied to memory of the caller.
struct FetchWork {
  // Shares pages with the sequence (copy-on-write), which may go on meanwhile.
  LayerRows rows;
  // Tokens [start, start + count) of every KV head: k and v are [H_kv, count, d].
  int64_t start = 0;
  int64_t count = 0;
  // If set, replaces that range: the tokens of each KV head, [H_kv] lists in any order, each
  // token below rows.token_count(). The rows of one head follow those of the head before, so k and
  // v are [sum of counts, d].
  std::optional<std::vector<std::vector<uint32_t>>> chosen = std::nullopt;
  // In the model's dtype. With `chosen`, the head strides are not used.
  RowTarget k = {};
  RowTarget v = {};
  // k and v are in GPU memory, with rows aligned to 16 bytes, and no work that was enqueued before
  // uses them. A device that cannot write there refuses the work.
  bool on_gpu = false;
  // May be null. Checked every few milliseconds; rows that were already copied stay.
  std::shared_ptr<CancelToken> cancel = nullptr;

  int64_t row_count() const;
};

// Copies rows to host memory, in parallel. CANCELLED or DEADLINE_EXCEEDED as work.cancel says;
// INVALID_ARGUMENT for GPU memory.
absl::Status FetchRows(const FetchWork& work);

}  // namespace spillway

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "host/device/cancel.h"
#include "host/memory/layer_rows.h"

namespace spillway {

// Rows of one layer that are copied to memory of a caller's.
struct FetchWork {
  // Shared as they shall be copied: the sequence may go on meanwhile.
  LayerRows rows;
  // Tokens [start, start + count) of every KV head: [H_kv, count, d] of k and of v.
  int64_t start = 0;
  int64_t count = 0;
  // In place of them tokens of each KV head, [H_kv] lists, ascending, each below
  // rows.token_count(): one head's rows after the other's, [sum of counts, d].
  std::optional<std::vector<std::vector<uint32_t>>> chosen = std::nullopt;
  // In the model's dtype; with chosen rows head strides are not used.
  RowTarget k = {};
  RowTarget v = {};
  // k and v lie in GPU memory, rows aligned to 16 bytes, and nothing that was enqueued
  // before uses them: a device that does not write there refuses the work.
  bool on_gpu = false;
  // May be null. Looked at every few milliseconds; what was copied before stays.
  std::shared_ptr<CancelToken> cancel = nullptr;

  int64_t row_count() const;
};

// Copies rows to host memory, in parallel. CANCELLED or DEADLINE_EXCEEDED.
// INVALID_ARGUMENT for GPU memory.
absl::Status FetchRows(const FetchWork& work);

}  // namespace spillway

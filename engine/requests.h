#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/sequence.h"
#include "host/device/device.h"

namespace spillway {

// K or V of a chunk, [layer_count, H_kv, count, d] in the model's dtype: the first layer, and the
// bytes from one layer to the next.
struct ChunkSource {
  RowSource first;
  int64_t layer_stride = 0;

  // Rows in C order. bytes: K or V of one row.
  static ChunkSource Dense(const void* data, int kv_head_count, int64_t count, int64_t bytes) {
    return {RowSource::Dense(data, count, bytes), kv_head_count * count * bytes};
  }
  RowSource Layer(int offset) const {
    RowSource layer = first;
    layer.data += offset * layer_stride;
    return layer;
  }
};

// New K/V rows of consecutive tokens, for consecutive layers. The bytes are not owned: they must
// stay valid until the request is answered.
struct Chunk {
  int layer_start = 0;
  int layer_count = 0;
  int64_t start = 0;       // position of the first token
  int64_t count = 0;       // tokens, at least 1
  int64_t generation = 0;  // of the sequence, as the caller knows it
  ChunkSource k;
  ChunkSource v;
  // Others may change the bytes at any time, so they are checked for finite elements after they
  // were copied. If false, the caller must call CheckFinite() first.
  bool shared_source = false;
  // The source is in the memory of a GPU of this process. shared_source is true then.
  bool on_gpu = false;
  // The GPU, if the memory is that of a region, which another process may map. Null: unknown, the
  // device finds out.
  const Device* gpu = nullptr;
  // Keep the memory of K and V alive, if the caller does not do so itself.
  std::shared_ptr<const void> k_memory = nullptr;
  std::shared_ptr<const void> v_memory = nullptr;
};

struct AppendRequest {
  std::shared_ptr<Sequence> sequence;
  Chunk chunk;
  std::shared_ptr<CancelToken> cancel;  // checked before the append starts, and not later
};

struct AppendOutcome {
  bool already_present = false;  // all rows were there with equal bytes
  std::vector<int64_t> layer_token_counts;
};

// Queries of one sequence.
struct AttendItem {
  std::shared_ptr<Sequence> sequence;
  // Rows to append before the attend, for the request's layer only.
  std::optional<Chunk> append;
  // The caller sets policy, q_dtype, q, query_count and, unless the queries are causal over the
  // last tokens, visible. q must stay valid until the request is answered.
  AttendQuery attend;
  // Keeps the memory of q alive, if the caller does not do so itself.
  std::shared_ptr<const void> q_memory = nullptr;
};

// Attention at one layer for sequences of one model, each at most once.
struct AttendRequest {
  int layer = 0;
  std::vector<AttendItem> items;
  std::shared_ptr<CancelToken> cancel;  // may be null
  bool select_only = false;
  // The calling thread waits for the outcome (Job::waited_for).
  bool waited_for = false;
  // Trace id of the call (Caller::trace()); empty: none.
  std::string trace = {};
};

// The rows of one layer of a sequence, unaffected by later operations.
struct SharedRows {
  LayerRows rows;
  Device* device;  // on which the sequence lives
};

// The rows of all layers of a sequence, unaffected by later operations.
struct SharedSequence {
  std::vector<LayerRows> rows;  // by layer, token_count tokens each
  int64_t token_count = 0;
  int64_t generation = 0;
};

struct AttendOutcome {
  // The job as the device filled it; each item has its own status.
  std::unique_ptr<Job> job;
};

}  // namespace spillway

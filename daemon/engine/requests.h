#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/engine/sequence.h"
#include "host/device/device.h"

namespace spillway {

// K or V of a chunk, [layer_count, H_kv, count, d] in the model's dtype: of the
// first layer, and how far layers are apart, bytes.
struct ChunkSource {
  RowSource first;
  int64_t layer_stride = 0;

  // In C order. bytes: of one row's K or V.
  static ChunkSource Dense(const void* data, int kv_head_count, int64_t count, int64_t bytes) {
    return {RowSource::Dense(data, count, bytes), kv_head_count * count * bytes};
  }
  RowSource Layer(int offset) const {
    RowSource layer = first;
    layer.data += offset * layer_stride;
    return layer;
  }
};

// New K/V rows of consecutive tokens of consecutive layers. The bytes are not
// owned: they stay until the request is answered.
struct Chunk {
  int layer_start = 0;
  int layer_count = 0;
  int64_t start = 0;       // position of the first token
  int64_t count = 0;       // tokens, at least 1
  int64_t generation = 0;  // of the sequence, as the caller knows it
  ChunkSource k;
  ChunkSource v;
  // Others may change the bytes meanwhile: whether they are finite shows when
  // they have been copied. Else CheckFinite() is the caller's to do before.
  bool shared_source = false;
  // The source, which is shared, lies in the memory of a GPU of this process.
  bool on_gpu = false;
  // Which GPU's, where that is known. Null: the device finds out.
  const Device* gpu = nullptr;
  // What K and V lie in, where that is not the caller's to keep.
  std::shared_ptr<const void> k_memory = nullptr;
  std::shared_ptr<const void> v_memory = nullptr;
};

struct AppendRequest {
  std::shared_ptr<Sequence> sequence;
  Chunk chunk;
  std::shared_ptr<CancelToken> cancel;  // looked at before the append starts
};

struct AppendOutcome {
  bool already_present = false;  // all of it was there with equal bytes
  std::vector<int64_t> layer_token_counts;
};

// Queries of one sequence.
struct AttendItem {
  std::shared_ptr<Sequence> sequence;
  // Appended first; one layer, the request's.
  std::optional<Chunk> append;
  // Asked when the item's turn comes, with the layer's length; an error fails
  // the item before anything happens. May be null.
  std::function<absl::Status(int64_t layer_token_count)> gate;
  // policy, q_dtype, q, query_count and, unless the queries are causal over
  // the last tokens, visible. q stays until the request is answered.
  AttendQuery attend;
  // What q lies in, where that is not the caller's to keep.
  std::shared_ptr<const void> q_memory = nullptr;
};

// One layer of sequences of one model, none twice.
struct AttendRequest {
  int layer = 0;
  std::vector<AttendItem> items;
  std::shared_ptr<CancelToken> cancel;  // may be null
  bool select_only = false;
  // The outcome shall share each item's rows as they were attended.
  bool share_rows = false;
  // The calling thread waits for the outcome (Job::waited_for).
  bool waited_for = false;
  // By what its client's tracing knows the call; empty where it does not say.
  std::string trace = {};
};

// One layer of a sequence, unaffected by what follows.
struct SharedRows {
  LayerRows rows;
  Device* device;  // that the sequence lives on
};

// All layers of a sequence, unaffected by what follows.
struct SharedSequence {
  std::vector<LayerRows> rows;  // of token_count tokens each
  int64_t token_count = 0;
  int64_t generation = 0;
};

struct AttendOutcome {
  // The job as the device filled it; items have a status each.
  std::unique_ptr<Job> job;
  // Per item with share_rows: the layer's rows, unaffected by what follows.
  std::vector<LayerRows> rows;
};

}  // namespace spillway

// Splits the K/V rows of one append into messages of limited size.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

// K and V of one sequence, for consecutive tokens of consecutive layers.
struct KvRows {
  // sequences/{id}.
  std::string sequence;
  // The sequence's generation as the caller knows it.
  int64_t generation = 0;
  // Half-open range of layers [layer_start, layer_start + layer_count).
  int32_t layer_start = 0;
  int32_t layer_count = 0;
  // Position of the first token, and the number of tokens.
  int64_t token_start = 0;
  int64_t token_count = 0;
  // The model's shape.
  int32_t kv_head_count = 0;
  int32_t head_dim = 0;
  v1::DType dtype = v1::DTYPE_UNSPECIFIED;
  // Elements [layer_count, kv_head_count, token_count, head_dim], C order,
  // little endian. Not owned: must outlive the append.
  std::string_view k;
  std::string_view v;
};

// Yields the chunks of an append in order. If several whole layers fit into a message,
// a chunk has whole layers. Otherwise it has consecutive tokens of one layer. The
// chunks depend only on the shape and the message size, so a repeated append has the
// same chunks. Not thread-safe.
class KvChunker {
 public:
  // INVALID_ARGUMENT if the sizes do not match the shape, or if one token of one layer
  // does not fit into a message.
  static absl::StatusOr<KvChunker> Create(const KvRows& rows, int64_t message_bytes_max);

  // Fills `chunk` with the next rows. Returns false if there are none left.
  bool Next(v1::KvChunk& chunk);

 private:
  KvChunker(const KvRows& rows, int64_t chunk_layer_count, int64_t chunk_token_count)
      : rows_(rows), chunk_layer_count_(chunk_layer_count), chunk_token_count_(chunk_token_count) {}

  // Copies [layers, H_kv, tokens, d] out of `source` into `tensor`.
  void Copy(std::string_view source, int64_t layer_count, int64_t token_count,
            v1::Tensor& tensor) const;

  KvRows rows_;
  // Largest chunk; chunk_layer_count_ is 1 unless all tokens fit into a chunk.
  int64_t chunk_layer_count_;
  int64_t chunk_token_count_;
  // First layer and token of the next chunk, relative to the rows.
  int64_t layer_ = 0;
  int64_t token_ = 0;
};

}  // namespace spillway

#include "spillway/kv_chunker.h"

#include <algorithm>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "spillway/tensor.h"

namespace spillway {
namespace {

// Space for the message's other fields: the name, shapes and counters.
constexpr int64_t kHeaderBytes = 1024;

}  // namespace

absl::StatusOr<KvChunker> KvChunker::Create(const KvRows& rows, int64_t message_bytes_max) {
  const int64_t element_bytes = static_cast<int64_t>(DTypeBytes(rows.dtype));
  if (rows.layer_count < 1 || rows.token_count < 1 || rows.kv_head_count < 1 || rows.head_dim < 1 ||
      element_bytes == 0) {
    return absl::InvalidArgumentError(absl::StrCat("cannot append ", rows.layer_count,
                                                   " layers of ", rows.kv_head_count, " heads, ",
                                                   rows.token_count, " tokens and ", rows.head_dim,
                                                   " elements of ", v1::DType_Name(rows.dtype)));
  }
  const double total_bytes = static_cast<double>(rows.kv_head_count) * rows.head_dim *
                             static_cast<double>(element_bytes) * rows.layer_count *
                             static_cast<double>(rows.token_count);
  if (total_bytes > static_cast<double>(std::numeric_limits<int64_t>::max() / 2)) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot append ", total_bytes, " bytes: more than 2^62"));
  }
  const int64_t token_bytes = int64_t{rows.kv_head_count} * rows.head_dim * element_bytes;
  const auto expected = static_cast<size_t>(token_bytes * rows.layer_count * rows.token_count);
  if (rows.k.size() != expected || rows.v.size() != expected) {
    return absl::InvalidArgumentError(
        absl::StrCat("k has ", rows.k.size(), " bytes and v ", rows.v.size(), "; the shape [",
                     rows.layer_count, ", ", rows.kv_head_count, ", ", rows.token_count, ", ",
                     rows.head_dim, "] of ", v1::DType_Name(rows.dtype), " needs ", expected));
  }
  const int64_t chunk_tokens = (message_bytes_max - kHeaderBytes) / (2 * token_bytes);
  if (chunk_tokens < 1) {
    return absl::InvalidArgumentError(absl::StrCat("one token's K and V are ", 2 * token_bytes,
                                                   " bytes; a message holds ", message_bytes_max,
                                                   " with ", kHeaderBytes, " for its header"));
  }
  const int64_t chunk_layers = std::max<int64_t>(chunk_tokens / rows.token_count, 1);
  return KvChunker(rows, chunk_layers, std::min(chunk_tokens, rows.token_count));
}

bool KvChunker::Next(v1::KvChunk& chunk) {
  if (layer_ == rows_.layer_count) return false;
  const int64_t layer_count = std::min(chunk_layer_count_, rows_.layer_count - layer_);
  const int64_t token_count = std::min(chunk_token_count_, rows_.token_count - token_);
  chunk.set_sequence(rows_.sequence);
  chunk.set_generation(rows_.generation);
  chunk.set_layer_start(static_cast<int32_t>(rows_.layer_start + layer_));
  chunk.set_token_start(rows_.token_start + token_);
  Copy(rows_.k, layer_count, token_count, *chunk.mutable_k());
  Copy(rows_.v, layer_count, token_count, *chunk.mutable_v());
  token_ += token_count;
  if (token_ == rows_.token_count) {
    token_ = 0;
    layer_ += layer_count;
  }
  return true;
}

void KvChunker::Copy(std::string_view source, int64_t layer_count, int64_t token_count,
                     v1::Tensor& tensor) const {
  tensor.set_dtype(rows_.dtype);
  tensor.clear_shape();
  for (int64_t size :
       {layer_count, int64_t{rows_.kv_head_count}, token_count, int64_t{rows_.head_dim}}) {
    tensor.add_shape(size);
  }
  const size_t row_bytes = static_cast<size_t>(rows_.head_dim) * DTypeBytes(rows_.dtype);
  const size_t run_bytes = static_cast<size_t>(token_count) * row_bytes;
  std::string& data = *tensor.mutable_data();
  data.clear();
  data.reserve(run_bytes * static_cast<size_t>(layer_count * rows_.kv_head_count));
  for (int64_t layer = layer_; layer < layer_ + layer_count; ++layer) {
    for (int64_t head = 0; head < rows_.kv_head_count; ++head) {
      const int64_t row = (layer * rows_.kv_head_count + head) * rows_.token_count + token_;
      data.append(source.substr(static_cast<size_t>(row) * row_bytes, run_bytes));
    }
  }
}

}  // namespace spillway

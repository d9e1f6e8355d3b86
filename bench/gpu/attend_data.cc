#include "bench/gpu/attend_data.h"

#include <cstring>
#include <utility>

#include "host/base/elements.h"
#include "host/base/limits.h"
#include "host/core/keyed_hash.h"
#include "tbb/parallel_for.h"

namespace spillway::bench {
namespace {

// A nearly normal number from a counter. For speed, it is the sum of the bytes of a hash of the
// counter.
float Normal(uint64_t counter) {
  const uint64_t x = SplitMix64(counter);
  int sum = 0;
  for (int i = 0; i < 8; ++i) sum += static_cast<int>(x >> (8 * i) & 0xFF);
  return (static_cast<float>(sum) - 1020.0f) / 209.0f;
}

void Resize(const ModelSpec& spec, int64_t count, RowChunk& chunk) {
  const int64_t bytes = count * spec.kv_head_count * spec.row_bytes() / 2;
  chunk.k.resize(bytes);
  chunk.v.resize(bytes);
}

}  // namespace

void RandomData::Read(int64_t start, int64_t count, RowChunk& chunk) const {
  const int d = spec_.head_dim;
  const int64_t bytes = spec_.row_bytes() / 2;  // of a key; a value has as many
  Resize(spec_, count, chunk);
  tbb::parallel_for(int64_t{0}, count * spec_.kv_head_count, [&](int64_t r) {
    const uint64_t base = static_cast<uint64_t>((start * 64 + r) * 2 * d);
    float kv[2 * kHeadDimMax];
    for (int i = 0; i < 2 * d; ++i) kv[i] = Normal(base + i);
    FromFloat(spec_.dtype, kv, d, chunk.k.data() + r * bytes);
    FromFloat(spec_.dtype, kv + d, d, chunk.v.data() + r * bytes);
  });
}

std::vector<float> RandomData::Query(uint64_t seed, double spread) const {
  std::vector<float> q(int64_t{spec_.query_head_count} * spec_.head_dim);
  for (size_t i = 0; i < q.size(); ++i) {
    q[i] = static_cast<float>(spread) * Normal(seed * 1000003 + i);
  }
  return q;
}

absl::StatusOr<TraceData> TraceData::Open(const std::string& folder) {
  absl::StatusOr<TraceFiles> files = TraceFiles::Open(folder);
  if (!files.ok()) return files.status();
  TraceData data(*std::move(files));
  const auto query_count = static_cast<int64_t>(data.lengths_.size()) * data.queries_per_length_;
  if (data.files_.queries.bytes() !=
      query_count * data.spec().query_head_count * data.spec().head_dim * 4) {
    return absl::InvalidArgumentError(folder + ": the queries' size is not that of meta.json");
  }
  return data;
}

TraceData::TraceData(TraceFiles files)
    : files_(std::move(files)),
      lengths_(meta().at("lengths").get<std::vector<int64_t>>()),
      query_stride_(meta().at("query_stride")),
      queries_per_length_(meta().at("queries_per_length")) {}

void TraceData::Read(int64_t start, int64_t count, RowChunk& chunk) const {
  Resize(spec(), count, chunk);
  const int64_t bytes = spec().row_bytes() / 2;
  tbb::parallel_for(0, spec().kv_head_count, [&](int h) {
    const int64_t from = (h * files_.token_count + start) * bytes;
    std::memcpy(chunk.k.data() + h * count * bytes, files_.k.data() + from, count * bytes);
    std::memcpy(chunk.v.data() + h * count * bytes, files_.v.data() + from, count * bytes);
  });
}

std::vector<float> TraceData::Query(size_t at, int i) const {
  const int64_t floats = int64_t{spec().query_head_count} * spec().head_dim;
  const auto* const all = reinterpret_cast<const float*>(files_.queries.data());
  const float* const q = all + (static_cast<int64_t>(at) * queries_per_length_ + i) * floats;
  return {q, q + floats};
}

}  // namespace spillway::bench

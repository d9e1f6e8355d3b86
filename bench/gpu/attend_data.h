#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/mapped_file.h"
#include "host/model/model_spec.h"
#include "nlohmann/json.hpp"

namespace spillway::bench {

// K and V of tokens [start, start + count), each [H_kv][count][d].
struct RowChunk {
  std::vector<std::byte> k;
  std::vector<std::byte> v;
};

// Nearly normal rows and queries of any length. Gaussian keys say nothing of
// how many rows an error bound needs.
class RandomData {
 public:
  explicit RandomData(const ModelSpec& spec) : spec_(spec) {}
  void Read(int64_t start, int64_t count, RowChunk& chunk) const;
  // Logits have about this standard deviation: 1 is a flat softmax, at 5 few
  // keys take most of it.
  std::vector<float> Query(uint64_t seed, double spread) const;

 private:
  const ModelSpec spec_;
};

// A folder that bench/trace_data.py wrote. Move-only.
class TraceData {
 public:
  // INVALID_ARGUMENT where the files do not have the sizes that meta.json says.
  static absl::StatusOr<TraceData> Open(const std::string& folder);

  const nlohmann::ordered_json& meta() const { return meta_; }
  const ModelSpec& spec() const { return spec_; }
  const std::vector<int64_t>& lengths() const { return lengths_; }
  int queries_per_length() const { return queries_per_length_; }

  void Read(int64_t start, int64_t count, RowChunk& chunk) const;
  // Query i of the length lengths()[at], [H_q][d], and what it sees.
  std::vector<float> Query(size_t at, int i) const;
  int64_t visible(size_t at, int i) const { return lengths_[at] - i * query_stride_; }

 private:
  TraceData(nlohmann::ordered_json meta, ModelSpec spec, MappedFile k, MappedFile v,
            MappedFile queries);

  nlohmann::ordered_json meta_;
  ModelSpec spec_;
  MappedFile k_;        // [H_kv][tokens][d]
  MappedFile v_;        // the same
  MappedFile queries_;  // [lengths][queries per length][H_q][d] fp32
  std::vector<int64_t> lengths_;
  int64_t token_count_;
  int64_t query_stride_;
  int queries_per_length_;
};

}  // namespace spillway::bench

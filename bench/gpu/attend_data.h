#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/trace_files.h"
#include "host/model/model_spec.h"
#include "nlohmann/json.hpp"

namespace spillway::bench {

// K and V of tokens [start, start + count), each [H_kv][count][d].
struct RowChunk {
  std::vector<std::byte> k;
  std::vector<std::byte> v;
};

// Nearly normal rows and queries, for any number of tokens. Not for measuring how many rows an
// error bound needs: Gaussian keys do not show how many real keys need.
class RandomData {
 public:
  explicit RandomData(const ModelSpec& spec) : spec_(spec) {}
  void Read(int64_t start, int64_t count, RowChunk& chunk) const;
  // spread: the approximate standard deviation of the logits. 1 gives a flat softmax; with 5, a few
  // keys have most of the mass.
  std::vector<float> Query(uint64_t seed, double spread) const;

 private:
  const ModelSpec spec_;
};

// Rows and queries from TraceFiles. Move-only.
class TraceData {
 public:
  // INVALID_ARGUMENT if the files do not have the sizes in meta.json.
  static absl::StatusOr<TraceData> Open(const std::string& folder);

  const nlohmann::ordered_json& meta() const { return files_.meta; }
  const ModelSpec& spec() const { return files_.spec; }
  const std::vector<int64_t>& lengths() const { return lengths_; }
  int queries_per_length() const { return queries_per_length_; }

  void Read(int64_t start, int64_t count, RowChunk& chunk) const;
  // Query i at length lengths()[at], [H_q][d], and how many tokens this query sees.
  std::vector<float> Query(size_t at, int i) const;
  int64_t visible(size_t at, int i) const { return lengths_[at] - i * query_stride_; }

 private:
  explicit TraceData(TraceFiles files);

  TraceFiles files_;
  std::vector<int64_t> lengths_;
  int64_t query_stride_;
  int queries_per_length_;
};

}  // namespace spillway::bench

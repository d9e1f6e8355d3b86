// What attend-bench measures, and its command line options.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <map>
#include <string>

#include "spillway/v1/policy.pb.h"
#include "spillway/v1/tensor.pb.h"

namespace spillway::cli {

enum class BenchMode {
  // Unary Attend; the sequence keeps its length.
  kAttend,
  // Decode steps: each appends query_count tokens, then attends.
  kDecode,
};

struct BenchOptions {
  BenchMode mode = BenchMode::kAttend;
  // Shape of the temporary model.
  int32_t layer_count = 1;
  int32_t query_head_count = 32;
  int32_t kv_head_count = 8;
  int32_t head_dim = 128;
  v1::DType dtype = v1::DTYPE_BF16;
  int32_t bits_per_dim = 3;
  int32_t value_bits = 0;
  // Tokens appended before the measurement, and queries of each attend.
  int64_t token_count = 32768;
  int32_t query_count = 1;
  // Attends that are measured, and attends before them that are not.
  int32_t iteration_count = 100;
  int32_t warmup_count = 10;
  // Standard deviation of the logits: K is standard normal, queries are
  // scaled.
  double logit_stddev = 3;
  // Seed of K/V and queries. The policy has its own seed.
  uint64_t data_seed = 1;
  // Fields that are set override the daemon's defaults.
  v1::Policy policy;
  // The same fields as text. Keys are option names without "--".
  std::map<std::string, std::string> policy_overrides;
};

// Adds the options to a subcommand; parsing fills `options`, which must
// outlive `command`.
void AddBenchOptions(CLI::App& command, BenchOptions& options);

}  // namespace spillway::cli

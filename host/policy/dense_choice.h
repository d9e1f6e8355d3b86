#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "host/model/model_spec.h"

namespace spillway {

// Rates of a GPU.
struct GpuRates {
  double memory_bytes_per_us = 0;  // of its memory, as its clock and width say; 0: not known
  int multiprocessor_count = 1;
  int64_t query_rows_of_pass = 16;  // that share one pass of dense attention over the rows
};

// One sequence of a decode step.
struct DenseCandidate {
  int64_t token_count = 0;  // that its last query sees
  // Whether it may be attended densely: all its rows are in the GPU's memory, and its policy asks
  // for an answer and not for certain rows.
  bool may_be_dense = false;
  // Whether it is dense anyway, as its policy says.
  bool is_dense = false;
};

// Which sequences of a step are to be attended densely, because it then takes less time
// (docs/adr/0069): none, those for which it is less work, or all that may. Depends on the arguments
// alone. query_count: new tokens of each sequence. code_bytes: bytes of codes per token and KV
// head.
std::vector<bool> ChooseDense(const ModelSpec& spec, const GpuRates& rates, int64_t code_bytes,
                              int64_t query_count, std::span<const DenseCandidate> candidates);

}  // namespace spillway

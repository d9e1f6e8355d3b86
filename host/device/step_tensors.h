#pragma once

#include <cstddef>
#include <cstdint>

#include "host/base/dtype.h"
#include "host/core/step_place.h"

namespace spillway {

// One layer of a decode step, sequences in the step's order.
struct StepTensors {
  DType q_dtype = DType::kF32;
  StepPlace<const std::byte> q;  // [B, T, H_q, d]
  StepPlace<const std::byte> k;  // [B, T, H_kv, d] in the model's dtype
  StepPlace<const std::byte> v;  // the same
  DType out_dtype = DType::kF32;
  StepPlace<std::byte> out;  // [B, T, H_q, d]
  float* lse = nullptr;      // [B, T, H_q] in C order, or null

  bool operator==(const StepTensors&) const = default;
};

// The shape of a step's tensor, [sequence, token, head]; `bytes` per head.
struct StepRows {
  int64_t sequence_count;
  int64_t token_count;
  int64_t head_count;
  int64_t bytes;
};
void CopyStepRows(const StepRows& rows, const StepPlace<const std::byte>& from,
                  const StepPlace<std::byte>& to);

}  // namespace spillway

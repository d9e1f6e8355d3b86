#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "host/base/dtype.h"

namespace spillway {

// Where an input or output of a decode step lies: its first element, and the distances between
// sequences, tokens and heads in bytes. The elements of a head are adjacent.
template <typename Byte>
struct StepPlace {
  Byte* data = nullptr;
  int64_t sequence_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  Byte* At(int64_t sequence) const { return data + sequence * sequence_stride; }
  // The same place, read-only.
  operator StepPlace<const Byte>() const requires(!std::is_const_v<Byte>) {
    return {data, sequence_stride, token_stride, head_stride};
  }
  bool operator==(const StepPlace&) const = default;
};

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

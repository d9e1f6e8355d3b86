#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "host/base/host_device.h"

namespace spillway {

// Where an input or output of a decode step lies: its first element, and the distances between
// sequences, tokens and heads in bytes. The elements of a head are adjacent.
template <typename Byte>
struct StepPlace {
  Byte* data = nullptr;
  int64_t sequence_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;

  SPILLWAY_HOST_DEVICE Byte* At(int64_t sequence, int64_t token = 0, int64_t head = 0) const {
    return data + sequence * sequence_stride + token * token_stride + head * head_stride;
  }
  // The same place, read-only.
  template <std::same_as<const Byte> To>
  requires(!std::is_const_v<Byte>) operator StepPlace<To>() const {
    return {data, sequence_stride, token_stride, head_stride};
  }
  bool operator==(const StepPlace&) const = default;
};

}  // namespace spillway

#pragma once

#include <cstddef>
#include <cstdint>

#include "host/base/dtype.h"
#include "host/core/host_device.h"

// What kernels see of a decode step on a stream of the caller's: tensors in GPU
// memory, and what tells the host afterwards how it went. Launches of a step may
// be captured and run again for later tokens: what differs lies in memory.
namespace spillway::cuda {

// Where a unit's queries stand in tensors. Made with {}.
struct UnitPlace {
  int32_t item;
  int16_t query;
  int16_t kv_head;
};

// A tensor of the caller's in GPU memory: strides in bytes, the elements of a
// head lie side by side.
template <typename Byte>
struct CallerTensor {
  Byte* data = nullptr;
  int64_t item_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;

  SPILLWAY_HOST_DEVICE Byte* At(int64_t item, int64_t token, int64_t head) const {
    return data + item * item_stride + token * token_stride + head * head_stride;
  }
  bool operator==(const CallerTensor&) const = default;
};

// Of what was announced last; device memory.
struct StepHeader {
  // Of the launches that serve it: others are of an older announcement.
  uint64_t version = 0;
  // Of the announcement, from 1 on.
  uint32_t number = 0;
  uint32_t unused = 0;
};

// An element that is not finite of what a step was given: the announcement's
// number above, and below how far from the end it stands, so that the first one of
// the latest announcement is the largest. 0: none.
using BadElement = unsigned long long;
enum class StepInput : int { kK, kV, kQ };
// Where an element stands: heads are H_kv of K and V, H_q of q.
SPILLWAY_HOST_DEVICE inline BadElement MakeBadElement(uint32_t number, StepInput input,
                                                      int64_t token, int64_t head, int element) {
  const int64_t where =
      ((static_cast<int64_t>(input) * 256 + token) * 1024 + head) * 1024 + element;
  return (BadElement{number} << 32) | (0xFFFFFFFFu - static_cast<uint32_t>(where));
}
struct BadElementPlace {
  StepInput input;
  int64_t token;  // of the step's
  int64_t head;
  int element;
};
inline BadElementPlace PlaceOf(BadElement bad) {
  const uint32_t where = 0xFFFFFFFFu - static_cast<uint32_t>(bad);
  return {static_cast<StepInput>(where >> 28), where >> 20 & 255, where >> 10 & 1023,
          static_cast<int>(where & 1023)};
}

// By what launches know whether they serve what was announced last.
struct StepCheck {
  const StepHeader* header = nullptr;  // null: no step, a job
  uint64_t version = 0;
  const BadElement* bad = nullptr;  // [B], of the layer

  bool operator==(const StepCheck&) const = default;
};

struct CallerTensors {
  DType q_dtype = DType::kF32;
  CallerTensor<const std::byte> q;  // [B, T, H_q, d]
  DType out_dtype = DType::kF32;
  CallerTensor<std::byte> out;  // the same
  float* lse = nullptr;         // [B, T, H_q], may be null
  int32_t token_count = 0;      // T
  int32_t query_head_count = 0;
  StepCheck check;

  bool operator==(const CallerTensors&) const = default;
};

// How a unit's part of a step went; lies in pinned memory.
inline constexpr int kStepReportHeads = 16;
struct StepReport {
  // Of the launch, and of what was announced when it ran.
  uint64_t version = 0;
  uint32_t number = 0;
  uint32_t unused = 0;
  BadElement bad = 0;
  // Whether a head's output passes fp32's range.
  uint8_t overflow[kStepReportHeads] = {};
};

}  // namespace spillway::cuda

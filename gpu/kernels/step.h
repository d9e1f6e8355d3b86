#pragma once

#include <cstddef>
#include <cstdint>

#include "host/base/dtype.h"
#include "host/base/host_device.h"
#include "host/core/step_place.h"

// What kernels know of a decode step on a stream of the caller: tensors in GPU memory, and reports
// that tell the host how the step went. Launches of a step may be captured and run again for later
// tokens, so what differs is in memory.
namespace spillway::cuda {

inline constexpr uint32_t kNoToken = 0xFFFFFFFFu;  // no error

// Where a unit's queries are in the caller's tensors. Made with {}.
struct UnitPlace {
  int32_t item;
  int16_t query;
  int16_t group_index;
};

// The step that was announced last; in device memory.
struct StepHeader {
  // Launches with another version belong to an older announcement.
  uint64_t version = 0;
  // Number of the announcement, from 1 on.
  uint32_t number = 0;
  uint32_t unused = 0;
};

// A step's input element that is not finite. Upper half: number of the announcement. Lower half:
// larger the earlier the element is, by input, token, head and element. So the first one of the
// latest announcement is the largest. 0: none.
using BadElement = unsigned long long;
enum class StepInput : int { kK, kV, kQ };
// token: of the step; head: one of H_kv for K and V, of H_q for q.
SPILLWAY_HOST_DEVICE inline BadElement MakeBadElement(uint32_t number, StepInput input,
                                                      int64_t token, int64_t head, int element) {
  const int64_t where =
      ((static_cast<int64_t>(input) * 256 + token) * 1024 + head) * 1024 + element;
  return (BadElement{number} << 32) | (0xFFFFFFFFu - static_cast<uint32_t>(where));
}
struct BadElementPlace {
  StepInput input;
  int64_t token;  // of the step
  int64_t head;
  int element;
};
inline BadElementPlace PlaceOf(BadElement bad) {
  const uint32_t where = 0xFFFFFFFFu - static_cast<uint32_t>(bad);
  return {static_cast<StepInput>(where >> 28), where >> 20 & 255, where >> 10 & 1023,
          static_cast<int>(where & 1023)};
}

// How a launch finds out whether it serves the step that was announced last.
struct StepCheck {
  const StepHeader* header = nullptr;  // null: a job, not a step
  uint64_t version = 0;
  const BadElement* bad = nullptr;  // [B], of the layer

  bool operator==(const StepCheck&) const = default;
};

// The caller's tensors of a layer that an attend reads and writes, in GPU memory.
struct CallerTensors {
  DType q_dtype = DType::kF32;
  StepPlace<const std::byte> q;  // [B, T, H_q, d]
  DType out_dtype = DType::kF32;
  StepPlace<std::byte> out;  // the same
  float* lse = nullptr;      // [B, T, H_q], may be null
  int32_t token_count = 0;   // T
  int32_t query_head_count = 0;
  StepCheck check;

  bool operator==(const CallerTensors&) const = default;
};

// How a unit's part of a step went; lies in pinned memory.
inline constexpr int kStepReportHeads = 16;
struct StepReport {
  // version: of the launch; number: of the announcement when the launch ran.
  uint64_t version = 0;
  uint32_t number = 0;
  uint32_t unused = 0;
  BadElement bad = 0;
  // Per head: whether its output exceeds the range of the fp32 numbers.
  uint8_t overflow[kStepReportHeads] = {};
};

}  // namespace spillway::cuda

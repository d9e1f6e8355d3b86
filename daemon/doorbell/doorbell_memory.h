// Decode steps through memory that a client and its daemon share, instead of through
// messages. The client writes a call and its tensors and rings; one thread of the
// daemon answers it and rings back. One call at a time: each layer's queries come of
// the layer before.
#pragma once

#include <cstddef>
#include <cstdint>

#include "host/device/step_tensors.h"
#include "host/ipc/bell.h"

namespace spillway {

enum class DoorbellCallKind : uint32_t {
  kBegin = 1,    // data: a serialised v1::DecodeStep; the step before ends
  kAttend = 2,   // data: tensors, as StepLayout says
  kResults = 3,  // asks for the last attend's v1::AttendResponse from `offset` on
  kEnd = 4,
  // A decoder's, whose tensors lie in memory of the GPU that both map, as StepLayout
  // says. data: a serialised v1::DecodeStep; offset: token_count_max. It is answered
  // with a DecoderMemory. What was begun or open before ends.
  kOpenDecoder = 5,
  kDecoderNext = 6,     // announces the next tokens
  kDecoderAttend = 7,   // answered when out and lse are written
  kDecoderFinish = 8,   // ends the step
  kDecoderResults = 9,  // as kResults, of a layer of the step that has ended
  kDecoderSums = 10,    // of a layer; answered with an AttendSums
  kCloseDecoder = 11,   // lets the sequences go
};

// Numbers as of v1::DType.
struct DoorbellCall {
  DoorbellCallKind kind;
  int32_t layer;
  uint32_t q_dtype;
  uint32_t out_dtype;
  uint32_t wants_lse;
  uint32_t reserved;
  int64_t offset;      // bytes, or token_count_max
  int64_t byte_count;  // of the data
};

// What a step's tensors look like, as its begin is answered.
struct StepShape {
  int32_t sequence_count;
  int32_t token_count;
  int32_t query_head_count;
  int32_t kv_head_count;
  int32_t head_dim;
  uint32_t row_dtype;
};

struct DoorbellAnswer {
  int32_t code;         // 0, or of an error: then the text is a serialised google.rpc.Status
  uint32_t text_bytes;  // of the text
  int64_t byte_count;   // kResults: of the data
  int64_t left;         // kResults: bytes that follow those
  StepShape shape;      // kBegin, kOpenDecoder
  uint64_t version;     // kDecoderNext: of the launches
};

// Where a decoder's tensors lie.
struct DecoderMemory {
  int64_t byte_count;
  char device[64];  // the GPU's UUID, ends with NUL
  char handle[64];  // what CUDA maps it by (cudaIpcMemHandle_t)
};

// A region begins with this; the data follow. Errors have a place of their own, for
// where one sequence fails the data still hold the others' outputs.
struct DoorbellMemory {
  // Changed by the client to make a call.
  Bell rung;
  // The daemon gives it the number of the call that is answered.
  Bell answered;
  alignas(64) DoorbellCall call;
  alignas(64) DoorbellAnswer answer;
  alignas(64) std::byte text[12 << 10];

  static constexpr int64_t kDataOffset = 16 << 10;
  static constexpr int64_t kDataBytesMin = 128 << 10;
};
static_assert(sizeof(DoorbellMemory) <= DoorbellMemory::kDataOffset);

// Where a layer's tensors lie, in the data or in a decoder's memory: one after the other in C
// order, each on a boundary of 64 bytes.
struct StepLayout {
  StepLayout(const StepShape& shape, DType q_dtype, DType row_dtype, DType out_dtype);

  // At data. Strides are those of C order.
  StepTensors At(std::byte* data, bool with_lse) const;

  const StepShape shape;
  const DType q_dtype, row_dtype, out_dtype;
  int64_t k_offset, v_offset, out_offset, lse_offset;
  int64_t byte_count;
};

// What memory for a step's tensors is made for: queries and outputs in float32 take the most.
inline StepLayout LargestLayout(const StepShape& shape, DType row_dtype) {
  return StepLayout(shape, DType::kF32, row_dtype, DType::kF32);
}

// A step's tensor of so many heads.
inline StepRows RowsOf(const StepShape& shape, int64_t head_count, DType dtype) {
  return {shape.sequence_count, shape.token_count, head_count,
          int64_t{shape.head_dim} * DTypeBytes(dtype)};
}

}  // namespace spillway

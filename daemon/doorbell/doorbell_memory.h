// Decode steps through memory that a client and its daemon share, instead of through messages. The
// client writes a call and its tensors and rings; a thread of the daemon answers the call and rings
// back. There is one call at a time, because each layer's queries depend on the layer before.
#pragma once

#include <cstddef>
#include <cstdint>

#include "host/device/step_tensors.h"
#include "host/ipc/bell.h"

namespace spillway {

enum class DoorbellCallKind : uint32_t {
  kBegin = 1,    // data: a serialised v1::DecodeStep; ends the step before
  kAttend = 2,   // data: tensors, as StepLayout says
  kResults = 3,  // asks for the last attend's v1::AttendResponse, from byte `offset` on
  kEnd = 4,
  // Calls of a decoder, whose tensors are in GPU memory that both processes map, as StepLayout
  // says. kOpenDecoder: data is a serialised v1::DecodeStep, offset is token_count_max, and the
  // answer is a DecoderMemory. A step or decoder that was open ends.
  kOpenDecoder = 5,
  kDecoderNext = 6,     // announces the next tokens
  kDecoderAttend = 7,   // answered when out and lse are written
  kDecoderFinish = 8,   // ends the step
  kDecoderResults = 9,  // as kResults, for a layer of the last step that has ended
  kDecoderSums = 10,    // asks for a layer's AttendSums
  kCloseDecoder = 11,   // releases the sequences
};

// q_dtype and out_dtype are numbers of v1::DType.
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

// Shape of a step's tensors, in the answer to kBegin or kOpenDecoder.
struct StepShape {
  int32_t sequence_count;
  int32_t token_count;
  int32_t query_head_count;
  int32_t kv_head_count;
  int32_t head_dim;
  uint32_t row_dtype;
};

struct DoorbellAnswer {
  int32_t code;         // 0: OK; else the text is a serialised google.rpc.Status, or empty
  uint32_t text_bytes;  // of the text
  int64_t byte_count;   // of the data
  int64_t left;         // kResults, kDecoderResults: bytes that follow those
  StepShape shape;      // kBegin, kOpenDecoder
  uint64_t version;     // kDecoderNext: StreamDecoder::version()
};

// The GPU memory with a decoder's tensors.
struct DecoderMemory {
  int64_t byte_count;
  char device[64];  // the GPU's UUID, ends with NUL
  char handle[64];  // with which CUDA maps it (cudaIpcMemHandle_t)
};

// The beginning of a region; the data follow at kDataOffset. Errors have their own place, because
// if one sequence fails, the data still contain the outputs of the others.
struct DoorbellMemory {
  // The client changes its number to make a call.
  Bell rung;
  // The daemon sets its number to that of the answered call.
  Bell answered;
  alignas(64) DoorbellCall call;
  alignas(64) DoorbellAnswer answer;
  alignas(64) std::byte text[12 << 10];

  static constexpr int64_t kDataOffset = 16 << 10;
  static constexpr int64_t kDataBytesMin = 128 << 10;
};
static_assert(sizeof(DoorbellMemory) <= DoorbellMemory::kDataOffset);

// Layout of a layer's tensors in the data or in a decoder's memory: q, k, v, out and lse one after
// the other, each in C order and aligned to 64 bytes.
struct StepLayout {
  StepLayout(const StepShape& shape, DType q_dtype, DType row_dtype, DType out_dtype);

  // The tensors in memory that begins at `data`. Strides are those of C order.
  StepTensors At(std::byte* data, bool with_lse) const;

  const StepShape shape;
  const DType q_dtype, row_dtype, out_dtype;
  int64_t k_offset, v_offset, out_offset, lse_offset;
  int64_t byte_count;
};

// The layout for which memory is allocated: queries and outputs in float32 take the most.
inline StepLayout LargestLayout(const StepShape& shape, DType row_dtype) {
  return StepLayout(shape, DType::kF32, row_dtype, DType::kF32);
}

// Shape of a step's tensor with head_count heads.
inline StepRows RowsOf(const StepShape& shape, int64_t head_count, DType dtype) {
  return {shape.sequence_count, shape.token_count, head_count,
          int64_t{shape.head_dim} * DTypeBytes(dtype)};
}

}  // namespace spillway

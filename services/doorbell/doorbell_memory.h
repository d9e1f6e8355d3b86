// Decode steps through memory that a client and its daemon share, instead of through messages. The
// client writes a call and its tensors and rings; a thread of the daemon answers the call and rings
// back. There is one call at a time, because each layer's queries depend on the layer before.
#pragma once

#include <cstddef>
#include <cstdint>

#include "host/device/step_layout.h"
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

}  // namespace spillway

#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/device/device.h"
#include "host/device/step_tensors.h"

namespace spillway {

// One sequence of a step.
struct StreamStepPart {
  DeviceSequence* sequence = nullptr;
  std::vector<LayerRows>* rows = nullptr;  // by layer
  Policy policy;                           // valid for the model
};

struct StreamStepOptions {
  std::vector<StreamStepPart> parts;
  int64_t token_count = 1;      // new tokens of each sequence in a step
  int64_t token_count_max = 0;  // of a sequence, that memory is made for
};

// What a device keeps of decode steps whose layers are enqueued on streams of the
// caller's, with tensors in the device's memory. Tokens are announced for all
// layers at once; the launches of a layer depend on no announcement and can be
// captured and run again for each, as long as version() stays the same. Two
// announcements can be on their way. Streams are the device's own handles
// (cudaStream_t). One thread at a time; nothing else touches the sequences.
class StreamStep {
 public:
  // How an announcement went.
  struct Outcome {
    bool ran = false;  // whether any layer was attended
    // Of each part: the first error of the lowest layer, of what the device found
    // (an element, a logit or an output that is not finite), or a layer that was
    // not attended. Its rows stay to be truncated.
    std::vector<absl::Status> parts;
  };

  // Waits for what is on its way.
  virtual ~StreamStep() = default;

  // Announces the next tokens, at the end of each part's rows, whose room was
  // prepared, and commits them: their bytes follow with the attends. What the
  // device has to know goes on the stream, behind what was put there for the
  // announcement before. An error changes nothing: OUT_OF_RANGE beyond
  // token_count_max, FAILED_PRECONDITION while the stream is captured,
  // UNIMPLEMENTED for tokens that only a step of the host's can append.
  // REQUIRES: fewer than two are on their way.
  virtual absl::Status Announce(void* stream) = 0;
  // Changes with an announcement whose launches differ from those before: what was
  // captured earlier must not run for it. If it does, outputs are NaN and the
  // outcome says so.
  virtual uint64_t version() const = 0;

  // Enqueues a layer: appends k and v, attends, writes out and lse. Nothing waits.
  // INVALID_ARGUMENT names a tensor that is not in the device's memory, or whose
  // rows are not aligned to 16 bytes; FAILED_PRECONDITION without an announcement.
  virtual absl::Status Attend(int layer, const StepTensors& tensors, void* stream) = 0;

  // Whether the device writes how many rows outlive the process (LayerRows::length_word()), as soon
  // as they are there. Else the caller does (LayerRows::Keep()), when a step is settled.
  virtual bool keeps_lengths() const { return false; }

  // Says that nothing more is put on the stream for the latest announcement.
  virtual absl::Status Conclude(void* stream) = 0;
  virtual int pending_count() const = 0;  // announced, not settled
  // Waits for the oldest announcement, which is concluded. An error is the
  // device's.
  virtual absl::StatusOr<Outcome> Settle() = 0;
  // What a layer of the last announcement that was settled came to: certificates
  // and counts of its items. Valid until the next announcement.
  virtual const Job& settled(int layer) const = 0;
};

}  // namespace spillway

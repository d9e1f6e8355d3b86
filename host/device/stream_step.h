#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/device/device.h"
#include "host/device/step_graph.h"
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
  int64_t token_count_max = 0;  // longest sequence that memory is allocated for
};

// A device's state for decode steps whose layers the caller enqueues on its own streams, with
// tensors in the device's memory. New tokens are announced for all layers at once. The launches of
// a layer do not depend on the announcement. So they can be captured once and replayed for each
// announcement, as long as version() stays the same. Two announcements can be pending. Streams are
// the device's own handles (cudaStream_t). One thread at a time, except as works_ahead() says;
// nothing else may use the sequences.
class StreamStep {
 public:
  // The outcome of an announcement.
  struct Outcome {
    bool ran = false;  // whether any layer was attended
    // For each part: OK, or the first error of the lowest layer that has one. That is an element, a
    // logit or an output that is not finite, or a layer that was not attended. The part's new rows
    // stay; the caller truncates them.
    std::vector<absl::Status> parts;
  };

  // Waits for pending announcements.
  virtual ~StreamStep() = default;

  // Announces the next tokens, at the end of each part's rows, whose pages were prepared, and
  // commits them: K and V follow with the attends. What the device must know is copied on the
  // stream, after the work that is there for the previous announcement. An error changes nothing:
  // OUT_OF_RANGE beyond token_count_max, FAILED_PRECONDITION while the stream is captured,
  // UNIMPLEMENTED for tokens that only a job (Submit()) can append. REQUIRES: fewer than two
  // announcements are pending.
  virtual absl::Status Announce(void* stream) = 0;

  // Whether PlanAhead() and Collect() make the next Announce() and Settle() short. One other thread
  // may call these two, in turn, beside Attend(), Run() and Conclude() of the latest announcement.
  virtual bool works_ahead() const { return false; }
  // Plans the announcement that is made next, whose pages were prepared. Enqueues nothing. Plans
  // nothing if the announcement would be refused or needs a job. After an error there is no plan,
  // and the pages must be given back.
  virtual absl::Status PlanAhead() { return absl::OkStatus(); }
  virtual bool is_planned() const { return false; }
  // Drops the plan, if there is one, before its pages are given back. May wait for a copy.
  virtual void DropPlan() {}
  // Changes with an announcement whose launches differ from those before. Launches that were
  // captured earlier must not run for it: then outputs are NaN, and the outcome says so.
  virtual uint64_t version() const = 0;

  // Enqueues a layer: appends k and v, attends, writes out and lse. Does not wait. INVALID_ARGUMENT
  // names a tensor that is not in the device's memory, or whose rows are not aligned to 16 bytes;
  // FAILED_PRECONDITION without an announcement.
  virtual absl::Status Attend(int layer, const StepTensors& tensors, void* stream) = 0;

  // Enqueues the graph with this step's attends in the places that it leaves open. On a GPU this is
  // one launch. The first run of a graph takes some ms, and so does the first after a change of
  // version(). INVALID_ARGUMENT for a layer that the model does not have, and as for Attend();
  // FAILED_PRECONDITION without an announcement, for a graph that is not complete, or if the stream
  // is captured.
  virtual absl::Status Run(StepGraph& graph, void* stream);

  // Whether the device itself records how many rows outlive the process (LayerRows::length_word()),
  // as soon as they are written. If not, the caller does (LayerRows::Keep()) when a step is
  // settled.
  virtual bool keeps_lengths() const { return false; }

  // Says that nothing more will be enqueued for the latest announcement.
  virtual absl::Status Conclude(void* stream) = 0;
  virtual int pending_count() const = 0;  // announced, but not settled
  // Waits for the oldest announcement, which must be concluded. An error status is a failure of the
  // device; errors of parts are in the outcome.
  virtual absl::StatusOr<Outcome> Settle() = 0;
  // For a step that works ahead: does not wait, and returns what Settle() will. Null: the oldest
  // announcement has not ended.
  virtual const absl::StatusOr<Outcome>* Collect() { return nullptr; }
  // The results of a layer of the announcement that was settled or collected last: certificates and
  // counts of its items. Valid until the next announcement.
  virtual const Job& settled(int layer) const = 0;
};

}  // namespace spillway

#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "host/base/status_macros.h"
#include "host/device/step_tensors.h"

namespace spillway {

// A step of a caller's model, captured into a graph that leaves the model's attends open. A
// StreamStep runs it with its own attends in their places, so one graph serves different sequences,
// and sequences that grow. Streams and graphs are those of the device (cudaStream_t, cudaGraph_t).
// Not thread-safe.
class StepGraph {
 public:
  struct OpenAttend {
    int layer;
    StepTensors tensors;
  };

  virtual ~StepGraph() = default;

  // Leaves a layer's attend open at this point of a stream that is being captured. Tensors as for
  // StreamStep::Attend(), of at least as many sequences as the steps that run the graph; a step
  // uses the first ones. What was left open in an earlier capture, which has failed, is forgotten.
  // INVALID_ARGUMENT for a layer that is open already; FAILED_PRECONDITION if the stream is not
  // captured, or the graph is complete.
  virtual absl::Status LeaveOpen(int layer, const StepTensors& tensors, void* stream) = 0;
  // Takes a copy of the captured graph, after the capture. The memory that its kernels use must
  // outlive this object and all runs. INVALID_ARGUMENT if attends were left open in another
  // capture, or do not follow one another.
  virtual absl::Status Complete(void* captured) = 0;

  // The attends left open, in the order of the graph.
  virtual const std::vector<OpenAttend>& attends() const = 0;
  // Enqueues the part of the graph before the attend with this index, or after the last one, for
  // callers that attend in another way. The first run of a piece takes some ms. OUT_OF_RANGE for an
  // index above the number of attends; FAILED_PRECONDITION if the graph is not complete.
  virtual absl::Status RunPiece(int64_t piece, void* stream) = 0;
};

// Runs the graph, and calls attend(layer, tensors) for each attend that it leaves open.
template <typename Attend>
absl::Status RunByPieces(StepGraph& graph, void* stream, Attend attend) {
  int64_t piece = 0;
  for (const StepGraph::OpenAttend& open : graph.attends()) {
    RETURN_IF_ERROR(graph.RunPiece(piece++, stream));
    RETURN_IF_ERROR(attend(open.layer, open.tensors));
  }
  return graph.RunPiece(piece, stream);
}

}  // namespace spillway

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/cuda/graph.h"
#include "host/device/step_graph.h"

namespace spillway::cuda {

// A step graph on a GPU. An empty node of the captured graph marks the place of each attend.
class CudaStepGraph final : public StepGraph {
 public:
  CudaStepGraph();

  absl::Status LeaveOpen(int layer, const StepTensors& tensors, void* stream) override;
  absl::Status Complete(void* captured) override;
  const std::vector<OpenAttend>& attends() const override { return attends_; }
  absl::Status RunPiece(int64_t piece, void* stream) override;

  // Unique in this process. Numbers of graphs that are gone are not used again.
  uint64_t number() const { return number_; }
  absl::Status CheckComplete() const;
  // The graph with `layers[i]` in the place of the attend with index i. FAILED_PRECONDITION as
  // CheckComplete().
  absl::StatusOr<Graph> With(const std::vector<CapturedGraph>& layers) const;

 private:
  // An edge between the nodes of graph_ with these indices.
  struct Edge {
    size_t from, to;
  };
  absl::StatusOr<std::vector<Edge>> Edges() const;
  // Sets piece_of_ from the nodes and edges of graph_.
  absl::Status Divide();
  bool IsMark(cudaGraphNode_t node) const;

  const uint64_t number_;
  uint64_t capture_ = 0;  // CUDA's number of the capture in which attends_ were left open
  std::vector<OpenAttend> attends_;
  std::vector<cudaGraphNode_t> marks_;  // of the capture, then of graph_
  CapturedGraph graph_;
  std::vector<cudaGraphNode_t> nodes_;  // of graph_
  // For each node, the number of attends before it. That of a mark does not count itself.
  std::vector<int64_t> piece_of_;
  std::vector<Graph> pieces_;  // made when they are first run
};

}  // namespace spillway::cuda

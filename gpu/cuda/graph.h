#pragma once

#include <cuda_runtime_api.h>

#include <utility>

#include "absl/status/statusor.h"
#include "gpu/cuda/error.h"
#include "host/base/status_macros.h"

namespace spillway::cuda {

// Whether the stream is being captured: work put on it becomes part of a graph and does not run.
inline absl::StatusOr<bool> IsCaptured(cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamIsCapturing(stream, &capture));
  return capture != cudaStreamCaptureStatusNone;
}

// Owner of a graph that cannot run itself. Move-only.
class CapturedGraph {
 public:
  // Captures the work that `enqueue` puts on the stream. The work does not run. Fails if enqueue()
  // waits for the GPU. enqueue() returns a status.
  template <typename Enqueue>
  static absl::StatusOr<CapturedGraph> Of(cudaStream_t stream, Enqueue enqueue) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    absl::Status status = enqueue();
    CapturedGraph graph;
    status.Update(ToStatus(cudaStreamEndCapture(stream, &graph.graph_), "cudaStreamEndCapture"));
    if (!status.ok()) return status;
    return graph;
  }
  static absl::StatusOr<CapturedGraph> CopyOf(cudaGraph_t other) {
    CapturedGraph graph;
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaGraphClone(&graph.graph_, other));
    return graph;
  }
  CapturedGraph() = default;
  CapturedGraph(CapturedGraph&& o) noexcept : graph_(std::exchange(o.graph_, nullptr)) {}
  CapturedGraph& operator=(CapturedGraph&& o) noexcept {
    std::swap(graph_, o.graph_);
    return *this;
  }
  ~CapturedGraph() {
    if (graph_ != nullptr) SPILLWAY_CUDA_REPORT(cudaGraphDestroy(graph_));
  }
  explicit operator bool() const { return graph_ != nullptr; }
  cudaGraph_t get() const { return graph_; }

 private:
  cudaGraph_t graph_ = nullptr;
};

// Owner of an executable graph. Move-only.
class Graph {
 public:
  static absl::StatusOr<Graph> Of(const CapturedGraph& captured) {
    Graph graph;
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaGraphInstantiate(&graph.exec_, captured.get(), 0));
    return graph;
  }
  // As CapturedGraph::Of().
  template <typename Enqueue>
  static absl::StatusOr<Graph> Capture(cudaStream_t stream, Enqueue enqueue) {
    ASSIGN_OR_RETURN(const CapturedGraph captured, CapturedGraph::Of(stream, enqueue));
    return Of(captured);
  }
  Graph() = default;
  Graph(Graph&& o) noexcept : exec_(std::exchange(o.exec_, nullptr)) {}
  Graph& operator=(Graph&& o) noexcept {
    std::swap(exec_, o.exec_);
    return *this;
  }
  ~Graph() {
    if (exec_ != nullptr) SPILLWAY_CUDA_REPORT(cudaGraphExecDestroy(exec_));
  }
  explicit operator bool() const { return exec_ != nullptr; }
  absl::Status Launch(cudaStream_t stream) const {
    return ToStatus(cudaGraphLaunch(exec_, stream), "cudaGraphLaunch");
  }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace spillway::cuda

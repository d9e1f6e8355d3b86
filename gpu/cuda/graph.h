#pragma once

#include <cuda_runtime_api.h>

#include <utility>

#include "absl/status/statusor.h"
#include "gpu/cuda/error.h"

namespace spillway::cuda {

// Whether the stream is being captured: work put on it becomes part of a graph and does not run.
inline absl::StatusOr<bool> IsCaptured(cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamIsCapturing(stream, &capture));
  return capture != cudaStreamCaptureStatusNone;
}

// Owner of an executable graph. Move-only.
class Graph {
 public:
  // Captures the work that `enqueue` puts on the stream. The work does not run. Fails if enqueue()
  // waits for the GPU. enqueue() returns a status.
  template <typename Enqueue>
  static absl::StatusOr<Graph> Capture(cudaStream_t stream, Enqueue enqueue) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    absl::Status status = enqueue();
    cudaGraph_t captured = nullptr;
    status.Update(ToStatus(cudaStreamEndCapture(stream, &captured), "cudaStreamEndCapture"));
    Graph graph;
    if (status.ok()) {
      status = ToStatus(cudaGraphInstantiate(&graph.exec_, captured, 0), "cudaGraphInstantiate");
    }
    if (captured != nullptr) SPILLWAY_CUDA_REPORT(cudaGraphDestroy(captured));
    if (!status.ok()) return status;
    return graph;
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

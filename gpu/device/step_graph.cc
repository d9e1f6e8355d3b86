#include "gpu/device/step_graph.h"

#include <algorithm>
#include <atomic>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gpu/cuda/error.h"
#include "host/base/status_macros.h"

namespace spillway::cuda {
namespace {

uint64_t NextNumber() {
  static std::atomic<uint64_t> last = 0;
  return ++last;
}

// Nodes and the data of the edges to them. Edges of programmatic launches cannot be asked for
// without their data.
struct Neighbours {
  std::vector<cudaGraphNode_t> nodes;
  std::vector<cudaGraphEdgeData> edges;
};

template <typename Get>
absl::StatusOr<Neighbours> NeighboursOf(cudaGraphNode_t node, Get get) {
  size_t count = 0;
  SPILLWAY_CUDA_RETURN_IF_ERROR(get(node, nullptr, nullptr, &count));
  Neighbours found{std::vector<cudaGraphNode_t>(count), std::vector<cudaGraphEdgeData>(count)};
  if (count > 0) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(get(node, found.nodes.data(), found.edges.data(), &count));
  }
  return found;
}

// Puts `graph` in the place of a node that does nothing.
absl::Status Replace(cudaGraph_t whole, cudaGraphNode_t mark, cudaGraph_t graph) {
  ASSIGN_OR_RETURN(const Neighbours before, NeighboursOf(mark, cudaGraphNodeGetDependencies));
  ASSIGN_OR_RETURN(const Neighbours after, NeighboursOf(mark, cudaGraphNodeGetDependentNodes));
  cudaGraphNode_t child = nullptr;
  SPILLWAY_CUDA_RETURN_IF_ERROR(
      cudaGraphAddChildGraphNode(&child, whole, before.nodes.data(), before.nodes.size(), graph));
  const std::vector<cudaGraphNode_t> from(after.nodes.size(), child);
  if (!from.empty()) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaGraphAddDependencies(whole, from.data(), after.nodes.data(),
                                                           after.edges.data(), from.size()));
  }
  return ToStatus(cudaGraphDestroyNode(mark), "cudaGraphDestroyNode");
}

}  // namespace

CudaStepGraph::CudaStepGraph() : number_(NextNumber()) {}

absl::Status CudaStepGraph::LeaveOpen(int layer, const StepTensors& tensors, void* on) {
  if (graph_) return absl::FailedPreconditionError("the graph is complete");
  auto* const stream = static_cast<cudaStream_t>(on);
  ASSIGN_OR_RETURN(const bool captured, IsCaptured(stream));
  if (!captured) {
    return absl::FailedPreconditionError(
        "the stream is not being captured: attends are left open during a capture");
  }
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
  const cudaGraphNode_t* before = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  size_t count = 0;
  SPILLWAY_CUDA_RETURN_IF_ERROR(
      cudaStreamGetCaptureInfo(stream, &status, &id, &graph, &before, &edges, &count));
  if (id != capture_) {
    // An earlier capture has failed.
    attends_.clear();
    marks_.clear();
    capture_ = id;
  }
  if (std::ranges::find(attends_, layer, &OpenAttend::layer) != attends_.end()) {
    return absl::InvalidArgumentError(absl::StrCat("layer: ", layer, " is left open already"));
  }
  cudaGraphNode_t mark = nullptr;
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaGraphAddEmptyNode(&mark, graph, before, count));
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamUpdateCaptureDependencies(
      stream, &mark, nullptr, 1, cudaStreamSetCaptureDependencies));
  attends_.push_back({layer, tensors});
  marks_.push_back(mark);
  return absl::OkStatus();
}

absl::Status CudaStepGraph::Complete(void* captured) {
  if (graph_) return absl::FailedPreconditionError("the graph is complete already");
  ASSIGN_OR_RETURN(CapturedGraph copy, CapturedGraph::CopyOf(static_cast<cudaGraph_t>(captured)));
  std::vector<cudaGraphNode_t> marks;
  for (cudaGraphNode_t mark : marks_) {
    cudaGraphNode_t& copied = marks.emplace_back(nullptr);
    const cudaError_t found = cudaGraphNodeFindInClone(&copied, mark, copy.get());
    if (found == cudaSuccess) continue;
    cudaGetLastError();
    return absl::InvalidArgumentError("captured: attends were left open in another capture");
  }
  graph_ = std::move(copy);
  std::swap(marks_, marks);
  if (absl::Status status = Divide(); !status.ok()) {
    graph_ = CapturedGraph();
    std::swap(marks_, marks);
    return status;
  }
  pieces_.resize(attends_.size() + 1);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<CudaStepGraph::Edge>> CudaStepGraph::Edges() const {
  std::unordered_map<cudaGraphNode_t, size_t> index;
  for (size_t i = 0; i < nodes_.size(); ++i) index[nodes_[i]] = i;
  size_t count = 0;
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaGraphGetEdges(graph_.get(), nullptr, nullptr, nullptr, &count));
  std::vector<cudaGraphNode_t> from(count), to(count);
  std::vector<cudaGraphEdgeData> data(count);
  if (count > 0) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(
        cudaGraphGetEdges(graph_.get(), from.data(), to.data(), data.data(), &count));
  }
  std::vector<Edge> edges;
  edges.reserve(count);
  for (size_t i = 0; i < count; ++i) edges.push_back({index.at(from[i]), index.at(to[i])});
  return edges;
}

absl::Status CudaStepGraph::Divide() {
  size_t count = 0;
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaGraphGetNodes(graph_.get(), nullptr, &count));
  nodes_.resize(count);
  if (count > 0) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaGraphGetNodes(graph_.get(), nodes_.data(), &count));
  }
  ASSIGN_OR_RETURN(const std::vector<Edge> edges, Edges());
  std::vector<std::vector<size_t>> after(count);
  std::vector<size_t> waits_for(count, 0);
  for (const Edge& edge : edges) {
    after[edge.from].push_back(edge.to);
    ++waits_for[edge.to];
  }
  std::vector<bool> is_mark(count, false);
  for (size_t i = 0; i < count; ++i) {
    is_mark[i] = IsMark(nodes_[i]);
  }
  piece_of_.assign(count, 0);
  std::vector<size_t> ready;
  for (size_t i = 0; i < count; ++i) {
    if (waits_for[i] == 0) ready.push_back(i);
  }
  while (!ready.empty()) {
    const size_t node = ready.back();
    ready.pop_back();
    const int64_t next = piece_of_[node] + (is_mark[node] ? 1 : 0);
    for (size_t follower : after[node]) {
      piece_of_[follower] = std::max(piece_of_[follower], next);
      if (--waits_for[follower] == 0) ready.push_back(follower);
    }
  }
  // Marks were added in the order of the capture.
  for (size_t i = 0; i < count; ++i) {
    if (!is_mark[i]) continue;
    const auto place = std::ranges::find(marks_, nodes_[i]) - marks_.begin();
    if (piece_of_[i] == place) continue;
    return absl::InvalidArgumentError(absl::StrCat("captured: the attend of layer ",
                                                   attends_[static_cast<size_t>(place)].layer,
                                                   " does not follow that of the layer before it"));
  }
  return absl::OkStatus();
}

absl::Status CudaStepGraph::CheckComplete() const {
  return graph_ ? absl::OkStatus()
                : absl::FailedPreconditionError("the graph is not complete: its capture goes on");
}

bool CudaStepGraph::IsMark(cudaGraphNode_t node) const {
  return std::ranges::find(marks_, node) != marks_.end();
}

absl::StatusOr<Graph> CudaStepGraph::With(const std::vector<CapturedGraph>& layers) const {
  RETURN_IF_ERROR(CheckComplete());
  ASSIGN_OR_RETURN(const CapturedGraph copy, CapturedGraph::CopyOf(graph_.get()));
  for (size_t i = 0; i < marks_.size(); ++i) {
    cudaGraphNode_t mark = nullptr;
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaGraphNodeFindInClone(&mark, marks_[i], copy.get()));
    RETURN_IF_ERROR(Replace(copy.get(), mark, layers[i].get()));
  }
  return Graph::Of(copy);
}

absl::Status CudaStepGraph::RunPiece(int64_t piece, void* stream) {
  RETURN_IF_ERROR(CheckComplete());
  if (piece < 0 || piece >= std::ssize(pieces_)) {
    return absl::OutOfRangeError(
        absl::StrCat("piece: ", piece, " is not in [0, ", pieces_.size(), ")"));
  }
  Graph& made = pieces_[static_cast<size_t>(piece)];
  if (!made) {
    ASSIGN_OR_RETURN(const CapturedGraph copy, CapturedGraph::CopyOf(graph_.get()));
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (piece_of_[i] == piece && !IsMark(nodes_[i])) continue;
      cudaGraphNode_t node = nullptr;
      SPILLWAY_CUDA_RETURN_IF_ERROR(cudaGraphNodeFindInClone(&node, nodes_[i], copy.get()));
      SPILLWAY_CUDA_RETURN_IF_ERROR(cudaGraphDestroyNode(node));
    }
    ASSIGN_OR_RETURN(made, Graph::Of(copy));
  }
  return made.Launch(static_cast<cudaStream_t>(stream));
}

}  // namespace spillway::cuda

#include "gpu/device/step_graph.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gpu/cuda/buffer.h"
#include "gpu/cuda/stream.h"
#include "host/memory/memory_budget.h"

// Graphs whose attends are left open. Numbers are bytes that memsets write, and copies move.
namespace spillway::cuda {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kPlaces = 6;

class StepGraphTest : public ::testing::Test {
 protected:
  StepGraphTest() {
    EXPECT_EQ(cudaMemset(memory_.data(), 0, kPlaces), cudaSuccess);
    // The tests' streams do not wait for the one of cudaMemset().
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  absl::Status Set(int place, int value, cudaStream_t stream) {
    return ToStatus(cudaMemsetAsync(memory_.data() + place, value, 1, stream), "memset");
  }
  absl::Status Copy(int from, int to, cudaStream_t stream) {
    return ToStatus(cudaMemcpyAsync(memory_.data() + to, memory_.data() + from, 1,
                                    cudaMemcpyDeviceToDevice, stream),
                    "memcpy");
  }
  // A step with attends of layers 0 and 1. Place 0 is 1 before the first. It is copied to place 1
  // after the first, on a second stream too to place 4, and to place 2 after the second attend.
  CapturedGraph Captured(CudaStepGraph& graph) {
    cudaStream_t stream = stream_.get();
    absl::StatusOr<CapturedGraph> captured = CapturedGraph::Of(stream, [&]() -> absl::Status {
      EXPECT_EQ(Set(0, 1, stream), absl::OkStatus());
      EXPECT_EQ(graph.LeaveOpen(0, {}, stream), absl::OkStatus());
      EXPECT_EQ(cudaEventRecord(fork_.get(), stream), cudaSuccess);
      EXPECT_EQ(cudaStreamWaitEvent(side_.get(), fork_.get(), 0), cudaSuccess);
      EXPECT_EQ(Copy(0, 4, side_.get()), absl::OkStatus());
      EXPECT_EQ(cudaEventRecord(join_.get(), side_.get()), cudaSuccess);
      EXPECT_EQ(Copy(0, 1, stream), absl::OkStatus());
      EXPECT_EQ(cudaStreamWaitEvent(stream, join_.get(), 0), cudaSuccess);
      EXPECT_EQ(graph.LeaveOpen(1, {}, stream), absl::OkStatus());
      return Copy(0, 2, stream);
    });
    EXPECT_EQ(captured.status(), absl::OkStatus());
    return *std::move(captured);
  }
  // Sets place 0 to a value.
  CapturedGraph Attend(int value) {
    return *CapturedGraph::Of(other_.get(), [&] { return Set(0, value, other_.get()); });
  }
  std::vector<int> Places() {
    std::array<uint8_t, kPlaces> bytes{};
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(bytes.data(), memory_.data(), kPlaces, cudaMemcpyDeviceToHost),
              cudaSuccess);
    return {bytes.begin(), bytes.end()};
  }

  MemoryBudget budget_{1 << 20};
  DeviceBuffer memory_ = *DeviceBuffer::Create(256, &budget_, "a test");
  Stream stream_ = *Stream::Create(), side_ = *Stream::Create(), other_ = *Stream::Create();
  Event fork_ = *Event::Create(false), join_ = *Event::Create(false);
};

TEST_F(StepGraphTest, RunsWithAttendsInTheirPlaces) {
  CudaStepGraph graph;
  {
    const CapturedGraph captured = Captured(graph);
    ASSERT_EQ(graph.Complete(captured.get()), absl::OkStatus());
  }
  std::vector<CapturedGraph> layers;
  layers.push_back(Attend(7));
  layers.push_back(Attend(9));
  const Graph whole = *graph.With(layers);
  ASSERT_EQ(whole.Launch(stream_.get()), absl::OkStatus());
  EXPECT_THAT(Places(), ElementsAre(9, 7, 9, 0, 7, 0));
  // Other attends in the same graph.
  layers.front() = Attend(5);
  layers.back() = Attend(6);
  const Graph other = *graph.With(layers);
  ASSERT_EQ(other.Launch(stream_.get()), absl::OkStatus());
  EXPECT_THAT(Places(), ElementsAre(6, 5, 6, 0, 5, 0));
  ASSERT_EQ(whole.Launch(stream_.get()), absl::OkStatus());
  EXPECT_THAT(Places(), ElementsAre(9, 7, 9, 0, 7, 0));
}

TEST_F(StepGraphTest, RunsInPieces) {
  CudaStepGraph graph;
  ASSERT_EQ(graph.Complete(Captured(graph).get()), absl::OkStatus());
  for (int round = 0; round < 2; ++round) {
    ASSERT_EQ(graph.RunPiece(0, stream_.get()), absl::OkStatus());
    EXPECT_EQ(Places()[0], 1);
    ASSERT_EQ(Set(0, 7 + round, stream_.get()), absl::OkStatus());
    ASSERT_EQ(graph.RunPiece(1, stream_.get()), absl::OkStatus());
    EXPECT_EQ(Places()[1], 7 + round);
    EXPECT_EQ(Places()[4], 7 + round);
    ASSERT_EQ(Set(0, 9 + round, stream_.get()), absl::OkStatus());
    ASSERT_EQ(graph.RunPiece(2, stream_.get()), absl::OkStatus());
    EXPECT_EQ(Places()[2], 9 + round);
  }
  EXPECT_THAT(graph.RunPiece(3, stream_.get()).message(), HasSubstr("piece: 3 is not in [0, 3)"));
  EXPECT_THAT(graph.RunPiece(-1, stream_.get()).message(), HasSubstr("piece: -1"));
  int attended = 0;
  ASSERT_EQ(RunByPieces(graph, stream_.get(),
                        [&](int layer, const StepTensors&) {
                          EXPECT_EQ(layer, attended++);
                          return Set(0, 20 + layer, stream_.get());
                        }),
            absl::OkStatus());
  EXPECT_THAT(Places(), ElementsAre(21, 20, 21, 0, 20, 0));
}

TEST_F(StepGraphTest, RefusesWhatIsNoStep) {
  CudaStepGraph graph;
  EXPECT_THAT(graph.LeaveOpen(0, {}, stream_.get()).message(), HasSubstr("not being captured"));
  EXPECT_THAT(graph.RunPiece(0, stream_.get()).message(), HasSubstr("not complete"));
  EXPECT_EQ(graph.With({}).status().code(), absl::StatusCode::kFailedPrecondition);
  const CapturedGraph captured = Captured(graph);
  CudaStepGraph other;
  const CapturedGraph of_other = Captured(other);
  EXPECT_THAT(graph.Complete(of_other.get()).message(), HasSubstr("another capture"));
  // It can still be completed with its own.
  ASSERT_EQ(graph.Complete(captured.get()), absl::OkStatus());
  EXPECT_EQ(graph.Complete(captured.get()).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(graph.number(), other.number());

  CudaStepGraph twice;
  cudaStream_t stream = stream_.get();
  const auto captured_twice = CapturedGraph::Of(stream, [&] {
    EXPECT_EQ(twice.LeaveOpen(3, {}, stream), absl::OkStatus());
    EXPECT_THAT(twice.LeaveOpen(3, {}, stream).message(), HasSubstr("layer: 3 is left open"));
    return absl::OkStatus();
  });
  EXPECT_EQ(captured_twice.status(), absl::OkStatus());
}

TEST_F(StepGraphTest, ForgetsACaptureThatHasFailed) {
  CudaStepGraph graph;
  const auto failed = CapturedGraph::Of(stream_.get(), [&] {
    EXPECT_EQ(graph.LeaveOpen(7, {}, stream_.get()), absl::OkStatus());
    EXPECT_EQ(graph.LeaveOpen(0, {}, stream_.get()), absl::OkStatus());
    return absl::InternalError("the model failed");
  });
  EXPECT_FALSE(failed.ok());
  ASSERT_EQ(graph.Complete(Captured(graph).get()), absl::OkStatus());
  ASSERT_EQ(graph.attends().size(), 2);
  EXPECT_EQ(graph.attends()[0].layer, 0);
  EXPECT_EQ(graph.attends()[1].layer, 1);
}

TEST_F(StepGraphTest, RefusesAttendsBesideEachOther) {
  CudaStepGraph graph;
  cudaStream_t stream = stream_.get();
  const auto captured = CapturedGraph::Of(stream, [&]() -> absl::Status {
    EXPECT_EQ(Set(0, 1, stream), absl::OkStatus());
    EXPECT_EQ(cudaEventRecord(fork_.get(), stream), cudaSuccess);
    EXPECT_EQ(cudaStreamWaitEvent(side_.get(), fork_.get(), 0), cudaSuccess);
    EXPECT_EQ(graph.LeaveOpen(0, {}, stream), absl::OkStatus());
    EXPECT_EQ(graph.LeaveOpen(1, {}, side_.get()), absl::OkStatus());
    EXPECT_EQ(cudaEventRecord(join_.get(), side_.get()), cudaSuccess);
    return ToStatus(cudaStreamWaitEvent(stream, join_.get(), 0), "wait");
  });
  ASSERT_EQ(captured.status(), absl::OkStatus());
  EXPECT_THAT(graph.Complete(captured->get()).message(), HasSubstr("layer 1 does not follow"));
}

}  // namespace
}  // namespace spillway::cuda

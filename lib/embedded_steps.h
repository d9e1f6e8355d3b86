#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/step.h"
#include "engine/stream_decoder.h"
#include "lib/decoder.h"
#include "lib/step.h"
#include "services/embedded.h"

namespace spillway {

// A step of an engine in this process.
class EmbeddedStep final : public ClientStep {
 public:
  EmbeddedStep(std::shared_ptr<Embedded> engine, std::unique_ptr<Step> step, std::string trace)
      : engine_(std::move(engine)), step_(std::move(step)), trace_(std::move(trace)) {}

  absl::Status Ask(int layer, const StepTensors& tensors) override {
    answer_ = step_->Attend(layer, tensors);
    return absl::OkStatus();
  }
  std::optional<absl::Status> Await(const StepTensors&, BellWaiter::Clock::time_point) override {
    if (!answer_.has_value()) return NothingAsked();
    return *std::exchange(answer_, std::nullopt);
  }
  absl::StatusOr<v1::AttendResponse> Results() override {
    return engine_->ResultsOf(step_->last());
  }
  std::string DetailsOf(const absl::Status& status) const override {
    return engine_->DetailsOf(status, trace_);
  }

 private:
  // Declared first, so that it is destroyed last.
  const std::shared_ptr<Embedded> engine_;
  const std::unique_ptr<Step> step_;
  const std::string trace_;
  std::optional<absl::Status> answer_;  // of the last attend; empty after Await
};

// A decoder of an engine in this process.
class EmbeddedDecoder final : public ClientDecoder {
 public:
  EmbeddedDecoder(std::shared_ptr<Embedded> engine, std::unique_ptr<StreamDecoder> decoder,
                  std::string trace)
      : engine_(std::move(engine)), decoder_(std::move(decoder)), trace_(std::move(trace)) {}

  absl::Status Next(void* stream) override { return decoder_->Next(stream); }
  uint64_t version() const override { return decoder_->version(); }
  absl::Status Attend(int layer, const StepTensors& tensors, void* stream) override {
    return decoder_->Attend(layer, tensors, stream);
  }
  absl::Status Run(StepGraph& graph, void* stream) override { return decoder_->Run(graph, stream); }
  absl::Status Finish(void* stream) override { return decoder_->Finish(stream); }
  absl::StatusOr<std::string> Results(int layer) override {
    return engine_->ResultsOf(decoder_->ended(layer)).SerializeAsString();
  }
  absl::StatusOr<AttendSums> Sums(int layer) override { return decoder_->sums(layer); }
  int gpu() const override { return -1; }
  std::string DetailsOf(const absl::Status& status) const override {
    return engine_->DetailsOf(status, trace_);
  }

 private:
  // Declared first, so that it is destroyed last.
  const std::shared_ptr<Embedded> engine_;
  const std::unique_ptr<StreamDecoder> decoder_;
  const std::string trace_;
};

}  // namespace spillway

// Measures the attend of one layer by a decoder with CUDA tensors: with an embedded engine, whose
// time on the GPU is measured by events, and with a daemon on the same GPU, through its doorbell.
//
// The daemon must already run. For MPS, start it and this program with the same
// CUDA_MPS_PIPE_DIRECTORY (docs/gpu.md). The overhead of a call to the daemon is its round trip
// minus the median time of the embedded engine's kernels. The outputs of both must be
// bit-identical. The rows are Gaussian, and an error bound would need nearly all of them. So the
// policy attends the top share of the rows, without a tail or promise.
#include <cuda_runtime_api.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "cli/random_rows.h"
#include "spillway.h"
#include "spillway/v1/attention_service.pb.h"
#include "spillway/v1/model_service.pb.h"
#include "spillway/v1/sequence_service.pb.h"

namespace spillway::bench {
namespace {

constexpr int kLayers = 4;
constexpr int kQueryHeads = 32, kKvHeads = 8, kHeadDim = 128;
constexpr int64_t kElementBytes = 2;

struct Options {
  std::string target;
  std::string device = "cuda:0";
  std::string memory = "16GiB";
  int64_t token_count = 131072;
  int step_count = 200;
  double top = 0.02;
};

absl::Status LastError() {
  const char* message;
  const void* details;
  size_t size;
  const int code = spillway_error(&message, &details, &size);
  return absl::Status(static_cast<absl::StatusCode>(code), message);
}

absl::Status Cuda(cudaError_t error, const char* what) {
  return error == cudaSuccess
             ? absl::OkStatus()
             : absl::InternalError(absl::StrCat(what, ": ", cudaGetErrorString(error)));
}

using Channel = std::unique_ptr<spillway_channel, decltype(&spillway_channel_close)>;

// Calls a method with these requests. Returns its single response.
template <typename Response, typename Request>
absl::StatusOr<Response> Called(spillway_channel* channel, const char* method,
                                const std::vector<Request>& requests) {
  const std::unique_ptr<spillway_call, decltype(&spillway_call_close)> call(
      spillway_call_open(channel, method, 600, nullptr, 0), &spillway_call_close);
  if (call == nullptr) return LastError();
  for (const Request& request : requests) {
    const std::string text = request.SerializeAsString();
    spillway_call_send(call.get(), text.data(), text.size(), -1);
  }
  spillway_call_send_end(call.get());
  Response response;
  const void* message;
  size_t size;
  while (spillway_call_receive(call.get(), -1, &message, &size) == SPILLWAY_RECEIVED) {
    response.ParseFromArray(message, static_cast<int>(size));
  }
  const char* told;
  const void* details;
  const int code = spillway_call_status(call.get(), &told, &details, &size);
  if (code != 0) return absl::Status(static_cast<absl::StatusCode>(code), told);
  return response;
}

// Creates a model and a sequence with random rows, the same for every engine. Returns the
// sequence's name.
absl::StatusOr<std::string> Filled(spillway_channel* channel, const Options& options) {
  v1::CreateModelRequest create;
  v1::Model& spec = *create.mutable_model();
  spec.set_layer_count(kLayers);
  spec.set_query_head_count(kQueryHeads);
  spec.set_kv_head_count(kKvHeads);
  spec.set_head_dim(kHeadDim);
  spec.set_dtype(v1::DTYPE_BF16);
  spec.mutable_hash_weights()->mutable_rotation();
  const auto model = Called<v1::CreateModelResponse, v1::CreateModelRequest>(
      channel, "/spillway.v1.ModelService/CreateModel", {create});
  if (!model.ok()) return model.status();
  v1::CreateSequenceRequest made;
  made.mutable_sequence()->set_model(model->model().name());
  const auto sequence = Called<v1::CreateSequenceResponse, v1::CreateSequenceRequest>(
      channel, "/spillway.v1.SequenceService/CreateSequence", {made});
  if (!sequence.ok()) return sequence.status();
  const std::string name = sequence->sequence().name();
  cli::RandomRows random(v1::DTYPE_BF16, 1, 1);
  constexpr int64_t kChunk = 512;
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int64_t start = 0; start < options.token_count; start += kChunk) {
      const int64_t count = std::min(kChunk, options.token_count - start);
      v1::AppendRequest request;
      v1::KvChunk& chunk = *request.mutable_chunk();
      chunk.set_sequence(name);
      chunk.set_layer_start(layer);
      chunk.set_token_start(start);
      for (v1::Tensor* tensor : {chunk.mutable_k(), chunk.mutable_v()}) {
        tensor->set_dtype(v1::DTYPE_BF16);
        for (const int64_t size : {int64_t{1}, int64_t{kKvHeads}, count, int64_t{kHeadDim}}) {
          tensor->add_shape(size);
        }
        tensor->set_data(random.Draw(static_cast<size_t>(kKvHeads * count * kHeadDim)));
      }
      const auto appended = Called<v1::AppendResponse, v1::AppendRequest>(
          channel, "/spillway.v1.AttentionService/Append", {request});
      if (!appended.ok()) return appended.status();
    }
  }
  return name;
}

// The tensors of one token, in GPU memory.
struct Tensors {
  spillway_step_tensors of_step = {};
  std::byte* memory = nullptr;
  int64_t out_offset = 0;
  int64_t bytes = 0;

  ~Tensors() { cudaFree(memory); }
  absl::Status Create() {
    constexpr int64_t kQBytes = kQueryHeads * kHeadDim * kElementBytes;
    constexpr int64_t kRowBytes = kKvHeads * kHeadDim * kElementBytes;
    out_offset = kQBytes + 2 * kRowBytes;
    bytes = out_offset + kQBytes + kQueryHeads * int64_t{sizeof(float)};
    if (absl::Status status =
            Cuda(cudaMalloc(reinterpret_cast<void**>(&memory), bytes), "cudaMalloc");
        !status.ok()) {
      return status;
    }
    const auto at = [this](int64_t offset, int64_t size) {
      return spillway_tensor{memory + offset, size, size, kHeadDim * kElementBytes};
    };
    of_step.q_dtype = of_step.out_dtype = SPILLWAY_BF16;
    of_step.q = at(0, kQBytes);
    of_step.k = at(kQBytes, kRowBytes);
    of_step.v = at(kQBytes + kRowBytes, kRowBytes);
    of_step.out = at(out_offset, kQBytes);
    of_step.lse = reinterpret_cast<float*>(memory + out_offset + kQBytes);
    cli::RandomRows random(v1::DTYPE_BF16, 1, 2);
    const std::string inputs = random.Draw(static_cast<size_t>(out_offset / kElementBytes));
    absl::Status status = Cuda(
        cudaMemcpy(memory, inputs.data(), inputs.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
    // The measured streams do not wait for the default stream.
    status.Update(Cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"));
    return status;
  }
};

struct Measured {
  std::vector<double> round_trips_us;
  std::vector<double> device_us;  // between events before and after the attend
  std::vector<double> next_us;    // time to announce a step, divided by the number of layers
  std::string last_output;
};

absl::StatusOr<Measured> Measure(spillway_channel* channel, const Options& options) {
  auto name = Filled(channel, options);
  if (!name.ok()) return name.status();
  v1::DecodeStep description;
  description.set_token_count(1);
  v1::DecodeStep::Part& part = *description.add_parts();
  part.set_sequence(*name);
  part.set_token_start(options.token_count);
  description.mutable_policy()->mutable_top_k()->set_fraction(options.top);
  description.mutable_policy()->set_tail(v1::TAIL_NONE);
  const std::string text = description.SerializeAsString();
  const std::unique_ptr<spillway_decoder, decltype(&spillway_decoder_close)> decoder(
      spillway_decoder_open(channel, text.data(), text.size(),
                            options.token_count + options.step_count + 64),
      &spillway_decoder_close);
  if (decoder == nullptr) return LastError();
  Tensors tensors;
  absl::Status status = tensors.Create();
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  status.Update(Cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream"));
  status.Update(Cuda(cudaEventCreate(&begin), "an event"));
  status.Update(Cuda(cudaEventCreate(&end), "an event"));
  Measured measured;
  constexpr int kWarmUp = 20;
  for (int step = 0; step < kWarmUp + options.step_count && status.ok(); ++step) {
    uint64_t version;
    const absl::Time announced = absl::Now();
    if (spillway_decoder_next(decoder.get(), stream, &version) != 0) return LastError();
    status.Update(Cuda(cudaStreamSynchronize(stream), "next"));
    const double next_us = absl::ToDoubleMicroseconds(absl::Now() - announced) / kLayers;
    if (step >= kWarmUp) measured.next_us.push_back(next_us);
    for (int layer = 0; layer < kLayers && status.ok(); ++layer) {
      status.Update(Cuda(cudaEventRecord(begin, stream), "cudaEventRecord"));
      const absl::Time start = absl::Now();
      if (spillway_decoder_attend(decoder.get(), layer, &tensors.of_step, stream) != 0) {
        return LastError();
      }
      status.Update(Cuda(cudaEventRecord(end, stream), "cudaEventRecord"));
      // Spins, because a thread that sleeps wakes up late.
      cudaError_t ended;
      while ((ended = cudaEventQuery(end)) == cudaErrorNotReady) {
      }
      const double round_trip_us = absl::ToDoubleMicroseconds(absl::Now() - start);
      status.Update(Cuda(ended, "an attend"));
      float ms = 0;
      status.Update(Cuda(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime"));
      if (step < kWarmUp) continue;
      measured.round_trips_us.push_back(round_trip_us);
      measured.device_us.push_back(1000.0 * ms);
    }
  }
  if (!status.ok()) return status;
  if (spillway_decoder_finish(decoder.get(), stream) != 0) return LastError();
  measured.last_output.resize(static_cast<size_t>(tensors.bytes - tensors.out_offset));
  status = Cuda(cudaMemcpy(measured.last_output.data(), tensors.memory + tensors.out_offset,
                           measured.last_output.size(), cudaMemcpyDeviceToHost),
                "cudaMemcpy");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  if (!status.ok()) return status;
  return measured;
}

// By nearest rank. REQUIRES: values is not empty, share in (0, 1].
double Percentile(std::vector<double> values, double share) {
  const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(values.size())));
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(rank - 1), values.end());
  return values[rank - 1];
}

void Report(const char* name, const Measured& measured, double device_us) {
  const double round_trip = Percentile(measured.round_trips_us, 0.5);
  std::cout << absl::StrFormat("%-10s %11.1f %11.1f %11.1f %11.1f %11.1f\n", name, round_trip,
                               Percentile(measured.round_trips_us, 0.9), device_us,
                               round_trip - device_us, Percentile(measured.next_us, 0.5))
            << std::flush;
}

absl::Status Run(const Options& options) {
  const std::vector<std::string> settings = {
      "memory.limit=" + options.memory, "device.name=" + options.device, "models.sampling_seed=0"};
  const char* texts[] = {settings[0].c_str(), settings[1].c_str(), settings[2].c_str()};
  Measured embedded;
  {
    const Channel channel(spillway_channel_embed(texts, 3), &spillway_channel_close);
    if (channel == nullptr) return LastError();
    absl::StatusOr<Measured> measured = Measure(channel.get(), options);
    if (!measured.ok()) return measured.status();
    embedded = *std::move(measured);
  }
  std::cout << absl::StrFormat("%-10s %11s %11s %11s %11s %11s\n", "US A LAYER", "ROUND", "P90",
                               "DEVICE", "BEYOND", "NEXT");
  const double device_us = Percentile(embedded.device_us, 0.5);
  Report("embedded", embedded, device_us);
  if (options.target.empty()) return absl::OkStatus();
  const Channel channel(spillway_channel_open(options.target.c_str(), nullptr),
                        &spillway_channel_close);
  if (channel == nullptr) return LastError();
  const absl::StatusOr<Measured> daemon = Measure(channel.get(), options);
  if (!daemon.ok()) return daemon.status();
  Report("daemon", *daemon, device_us);
  if (daemon->last_output != embedded.last_output) {
    return absl::DataLossError("the daemon's outputs are not the embedded engine's");
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("A layer's attend by a decoder, embedded and to a daemon.", "decoder_bench");
  app.add_option("--target", options.target, "of a daemon on this GPU; without it embedded alone");
  app.add_option("--device", options.device, "of the embedded engine")->capture_default_str();
  app.add_option("--memory", options.memory, "of the embedded engine")->capture_default_str();
  app.add_option("--tokens", options.token_count, "of the sequence")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--steps", options.step_count, "that are measured")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--top", options.top, "share of the rows that are attended")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  if (const absl::Status status = Run(options); !status.ok()) {
    std::cerr << "decoder_bench: " << status << '\n';
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace spillway::bench

int main(int argc, char** argv) { return spillway::bench::Main(argc, argv); }

// Measures the overhead (round trip minus device time) of Attend, and of an attend of a decode step
// by messages and through a daemon's doorbell. Compares it with a bare gRPC echo that moves as many
// bytes over a socket of the same kind.
//
// Starts a daemon and an echo server on unix sockets in a temporary directory. Each round starts
// new ones: the cost of a wake-up depends on the processors on which the kernel places their
// threads, and stays the same while they run. Calls to the two servers alternate in short blocks,
// so that slow changes of the machine affect both. For gRPC, the client of both is the synchronous
// stub.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "bench/rpc/echo.grpc.pb.h"
#include "bench/rpc/server_pair.h"
#include "cli/cleanup.h"
#include "cli/random_rows.h"
#include "grpcpp/create_channel.h"
#include "nlohmann/json.hpp"
#include "spillway.h"
#include "spillway/client.h"
#include "spillway/error.h"
#include "spillway/tensor.h"

namespace spillway::bench {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string spillwayd;
  std::string echo_server;
  std::string json_path;
  std::string device = "auto";
  std::string cases;  // run only cases whose name contains this
  int round_count = 8;
  int block_count = 8;
  int block_size = 50;
};

// The kind of call: an Attend, or an attend of a decode step, by a message of a Step stream or
// through the daemon's doorbell. The step was announced before.
enum class Way { kAttend, kStep, kDoorbell };

// The shape of a case. Sequences are short: the device time is subtracted, but a client that waits
// longer also wakes up later, and an echo does not wait at all.
struct Case {
  std::string name;
  int32_t query_head_count;
  int32_t kv_head_count;
  int32_t head_dim;
  v1::DType dtype;
  int64_t token_count;
  Way way;
};

const std::vector<Case>& Cases() {
  static const auto* cases = new std::vector<Case>{
      {"attend 9/3 heads of 64, f32", 9, 3, 64, v1::DTYPE_F32, 16, Way::kAttend},
      {"attend 32/8 heads of 128, bf16", 32, 8, 128, v1::DTYPE_BF16, 16, Way::kAttend},
      {"step 9/3 heads of 64, f32", 9, 3, 64, v1::DTYPE_F32, 16, Way::kStep},
      {"step 32/8 heads of 128, bf16", 32, 8, 128, v1::DTYPE_BF16, 16, Way::kStep},
      {"doorbell 9/3 heads of 64, f32", 9, 3, 64, v1::DTYPE_F32, 16, Way::kDoorbell},
      {"doorbell 32/8 heads of 128, bf16", 32, 8, 128, v1::DTYPE_BF16, 16, Way::kDoorbell},
  };
  return *cases;
}

bool IsWanted(const Case& bench_case, const Options& options) {
  return bench_case.name.find(options.cases) != std::string::npos;
}

// By nearest rank. REQUIRES: values is not empty, share in (0, 1].
double Percentile(std::vector<double> values, double share) {
  const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(values.size())));
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(rank - 1), values.end());
  return values[rank - 1];
}

Json Percentiles(const std::vector<double>& values) {
  return {{"median", Percentile(values, 0.5)}, {"p99", Percentile(values, 0.99)}};
}

// The times of one call.
struct Timing {
  double round_trip_us = 0;
  double device_us = 0;
};
using TimedCall = std::function<absl::StatusOr<Timing>()>;

// Calls of one case to a daemon, with one model and one sequence.
class DaemonCalls {
 public:
  DaemonCalls(Client& client, const std::string& target, const Case& bench_case)
      : client_(client),
        channel_(spillway_channel_open(target.c_str(), nullptr), &spillway_channel_close),
        case_(bench_case),
        resources_(client),
        random_(bench_case.dtype, 1, 1),
        token_count_(bench_case.token_count) {}

  absl::Status Create() {
    v1::Model spec;
    spec.set_layer_count(1);
    spec.set_query_head_count(case_.query_head_count);
    spec.set_kv_head_count(case_.kv_head_count);
    spec.set_head_dim(case_.head_dim);
    spec.set_dtype(case_.dtype);
    spec.mutable_hash_weights()->mutable_rotation();
    auto model = client_.CreateModel("", spec);
    if (!model.ok()) return model.status();
    resources_.OwnModel(model->name());
    v1::Sequence sequence;
    sequence.set_model(model->name());
    auto created = client_.CreateSequence("", sequence);
    if (!created.ok()) return created.status();
    sequence_ = created->name();
    resources_.OwnSequence(sequence_);
    const std::string k = DrawRows(case_.token_count);
    const std::string v = DrawRows(case_.token_count);
    absl::Status status = client_
                              .Append({.sequence = sequence_,
                                       .layer_count = 1,
                                       .token_count = case_.token_count,
                                       .kv_head_count = case_.kv_head_count,
                                       .head_dim = case_.head_dim,
                                       .dtype = case_.dtype,
                                       .k = k,
                                       .v = v})
                              .status();
    if (!status.ok()) return status;
    if (case_.way == Way::kStep) stream_ = client_.OpenSteps();
    // Drawn only once, so that both servers are idle equally long between two calls.
    v1::AttendItem& item = *attend_request_.add_items();
    item.set_sequence(sequence_);
    *item.mutable_q() = MakeTensor(case_.dtype, {1, case_.query_head_count, case_.head_dim},
                                   random_.Draw(static_cast<size_t>(case_.query_head_count) *
                                                static_cast<size_t>(case_.head_dim)));
    v1::StepAttend& attend = *step_request_.mutable_attend();
    *attend.mutable_q() = item.q();
    attend.mutable_q()->clear_shape();
    for (const int64_t each :
         {int64_t{1}, int64_t{1}, int64_t{case_.query_head_count}, int64_t{case_.head_dim}}) {
      attend.mutable_q()->add_shape(each);
    }
    for (v1::Tensor* tensor : {attend.mutable_k(), attend.mutable_v()}) {
      *tensor = MakeTensor(case_.dtype, {1, 1, case_.kv_head_count, case_.head_dim}, DrawRows(1));
    }
    if (case_.way == Way::kDoorbell) FillTensors();
    return absl::OkStatus();
  }

  // Removes the tokens that decoding has appended.
  absl::Status Restart() {
    if (case_.way == Way::kAttend) return absl::OkStatus();
    const auto truncated = client_.TruncateSequence(sequence_, case_.token_count);
    if (!truncated.ok()) return truncated.status();
    generation_ = truncated->generation();
    token_count_ = case_.token_count;
    return absl::OkStatus();
  }

  absl::StatusOr<Timing> Call() {
    Timing timing;
    absl::StatusOr<v1::AttendResult> result;
    switch (case_.way) {
      case Way::kAttend:
        result = Attend(timing.round_trip_us);
        break;
      case Way::kStep:
        result = Step(timing.round_trip_us);
        break;
      case Way::kDoorbell:
        result = AttendStep(timing.round_trip_us);
        break;
    }
    if (!result.ok()) return result.status();
    if (absl::Status status = ToAbslStatus(result->status()); !status.ok()) return status;
    timing.device_us = result->statistics().device_time_us();
    return timing;
  }

  // Serialised sizes of the last call; with kDoorbell, the sizes of the tensors.
  size_t request_bytes() const { return request_bytes_; }
  size_t response_bytes() const { return response_bytes_; }

 private:
  std::string DrawRows(int64_t tokens) {
    return random_.Draw(static_cast<size_t>(tokens * case_.kv_head_count * case_.head_dim));
  }

  absl::StatusOr<v1::AttendResult> Attend(double& round_trip_us) {
    const absl::Time start = absl::Now();
    absl::StatusOr<v1::AttendResponse> response = client_.Attend(attend_request_);
    round_trip_us = absl::ToDoubleMicroseconds(absl::Now() - start);
    if (!response.ok()) return response.status();
    request_bytes_ = attend_request_.ByteSizeLong();
    response_bytes_ = response->ByteSizeLong();
    return std::move(*response->mutable_results(0));
  }

  // Describes the step that follows.
  v1::DecodeStep Description() const {
    v1::DecodeStep description;
    description.set_token_count(1);
    v1::DecodeStep::Part& part = *description.add_parts();
    part.set_sequence(sequence_);
    part.set_token_start(token_count_);
    part.set_generation(generation_);
    return description;
  }

  absl::StatusOr<v1::AttendResult> Step(double& round_trip_us) {
    *begin_request_.mutable_begin() = Description();
    if (absl::Status status = stream_->Send(begin_request_); !status.ok()) return status;
    const absl::Time start = absl::Now();
    const absl::Status status = stream_->Attend(step_request_, step_response_);
    round_trip_us = absl::ToDoubleMicroseconds(absl::Now() - start);
    if (!status.ok()) return status;
    if (step_response_.results_size() != 1) return ToAbslStatus(step_response_.status());
    ++token_count_;
    request_bytes_ = step_request_.ByteSizeLong();
    response_bytes_ = step_response_.ByteSizeLong();
    return step_response_.results(0);
  }

  static spillway_tensor Dense(std::string& data, int64_t head_bytes) {
    // The strides are those of one sequence with one token.
    return {data.data(), static_cast<int64_t>(data.size()), static_cast<int64_t>(data.size()),
            head_bytes};
  }

  void FillTensors() {
    const int64_t head_bytes = case_.head_dim * (case_.dtype == v1::DTYPE_F32 ? 4 : 2);
    q_ = step_request_.attend().q().data();
    k_ = step_request_.attend().k().data();
    v_ = step_request_.attend().v().data();
    out_.resize(q_.size());
    lse_.resize(static_cast<size_t>(case_.query_head_count));
    tensors_.q_dtype = tensors_.out_dtype = case_.dtype;
    tensors_.q = Dense(q_, head_bytes);
    tensors_.k = Dense(k_, head_bytes);
    tensors_.v = Dense(v_, head_bytes);
    tensors_.out = Dense(out_, head_bytes);
    tensors_.lse = lse_.data();
    // The echo that is compared moves these bytes.
    request_bytes_ = q_.size() + k_.size() + v_.size();
    response_bytes_ = out_.size() + lse_.size() * sizeof(float);
  }

  static absl::Status LastError() {
    const char* message;
    const void* details;
    size_t size;
    const int code = spillway_error(&message, &details, &size);
    return absl::Status(static_cast<absl::StatusCode>(code), message);
  }

  absl::StatusOr<v1::AttendResult> AttendStep(double& round_trip_us) {
    const std::string text = Description().SerializeAsString();
    const spillway_step_shape shape = {case_.query_head_count, case_.kv_head_count, case_.head_dim,
                                       case_.dtype};
    const std::unique_ptr<spillway_step, decltype(&spillway_step_end)> step(
        spillway_step_begin(channel_.get(), text.data(), text.size(), &shape, SPILLWAY_DOORBELL),
        &spillway_step_end);
    if (step == nullptr) return LastError();
    const absl::Time start = absl::Now();
    const int code = spillway_step_attend(step.get(), 0, &tensors_, -1);
    round_trip_us = absl::ToDoubleMicroseconds(absl::Now() - start);
    if (code != 0) return LastError();
    ++token_count_;
    const void* message;
    size_t size;
    if (spillway_step_results(step.get(), &message, &size) != 0) return LastError();
    v1::AttendResponse response;
    if (!response.ParseFromArray(message, static_cast<int>(size)) || response.results_size() != 1) {
      return absl::InternalError("a step's results are not one AttendResult");
    }
    return std::move(*response.mutable_results(0));
  }

  Client& client_;
  const std::unique_ptr<spillway_channel, decltype(&spillway_channel_close)> channel_;
  const Case& case_;
  cli::TemporaryResources resources_;
  cli::RandomRows random_;
  std::string sequence_;
  int64_t token_count_;
  int64_t generation_ = 0;
  std::string q_, k_, v_, out_;
  std::vector<float> lse_;
  spillway_step_tensors tensors_ = {};
  v1::AttendRequest attend_request_;
  v1::StepRequest step_request_, begin_request_;
  v1::StepResponse step_response_;
  // Declared after resources_, so that the stream ends before the resources are deleted.
  std::unique_ptr<StepStream> stream_;
  size_t request_bytes_ = 0;
  size_t response_bytes_ = 0;
};

// Calls to the echo server that send and receive as many bytes as those to the daemon.
class EchoCalls {
 public:
  EchoCalls(EchoService::Stub& stub, bool streaming, size_t request_bytes, size_t response_bytes)
      : stub_(stub) {
    // The serialised messages, including field headers, must have these sizes.
    EchoResponse response;
    FillTo(response_bytes, response);
    request_.set_response_bytes(static_cast<int64_t>(response.data().size()));
    FillTo(request_bytes, request_);
    if (streaming) stream_ = stub.EchoStream(&context_);
  }

  ~EchoCalls() {
    if (!stream_) return;
    stream_->WritesDone();
    stream_->Finish();
  }

  // The server is busy for busy_us, which counts as the call's device time.
  absl::StatusOr<Timing> Call(double busy_us) {
    request_.set_busy_us(busy_us);
    const absl::Time start = absl::Now();
    grpc::Status status = grpc::Status::OK;
    if (stream_) {
      if (!stream_->Write(request_) || !stream_->Read(&response_)) status = stream_->Finish();
    } else {
      EchoResponse response;
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
      status = stub_.Echo(&context, request_, &response);
    }
    const double round_trip_us = absl::ToDoubleMicroseconds(absl::Now() - start);
    if (!status.ok()) return ToAbslStatus(status);
    return Timing{.round_trip_us = round_trip_us, .device_us = busy_us};
  }

 private:
  template <typename Message>
  static void FillTo(size_t bytes, Message& message) {
    message.mutable_data()->assign(bytes, 'x');
    while (message.ByteSizeLong() > bytes) message.mutable_data()->pop_back();
  }

  EchoService::Stub& stub_;
  EchoRequest request_;
  EchoResponse response_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<EchoRequest, EchoResponse>> stream_;
};

// The times of the calls of one case over all rounds, in microseconds.
struct Samples {
  size_t request_bytes = 0;
  size_t response_bytes = 0;
  std::vector<double> round_trips;
  std::vector<double> device;
  std::vector<double> beyond;
  std::vector<double> echoes;
  std::vector<double> busy_echoes;
  std::vector<double> round_ratios;  // per round: median of beyond / median of echoes
};

absl::Status RunCase(ServerPair& servers, EchoService::Stub& echo_stub, const Case& bench_case,
                     const Options& options, Samples& samples) {
  DaemonCalls daemon(servers.client(), servers.daemon_target(), bench_case);
  if (absl::Status status = daemon.Create(); !status.ok()) return status;
  // The sizes of the messages are known after one call.
  if (auto first = daemon.Call(); !first.ok()) return first.status();
  samples.request_bytes = daemon.request_bytes();
  samples.response_bytes = daemon.response_bytes();
  EchoCalls echo(echo_stub, bench_case.way != Way::kAttend, daemon.request_bytes(),
                 daemon.response_bytes());

  std::vector<double> beyond;
  std::vector<double> echoes;
  // The first block of each server is a warm-up.
  for (int block = 0; block <= options.block_count; ++block) {
    if (absl::Status status = daemon.Restart(); !status.ok()) return status;
    for (int call = 0; call < options.block_size; ++call) {
      const absl::StatusOr<Timing> timing = daemon.Call();
      if (!timing.ok()) return timing.status();
      if (block == 0) continue;
      samples.round_trips.push_back(timing->round_trip_us);
      samples.device.push_back(timing->device_us);
      beyond.push_back(timing->round_trip_us - timing->device_us);
    }
    // Each call of the busy echo takes as much device time as one of the daemon's calls.
    for (const bool busy : {false, true}) {
      for (int call = 0; call < options.block_size; ++call) {
        const double busy_us =
            busy && block > 0 ? samples.device[samples.device.size() - 1 - call] : 0;
        const absl::StatusOr<Timing> timing = echo.Call(busy_us);
        if (!timing.ok()) return timing.status();
        if (block == 0) continue;
        (busy ? samples.busy_echoes : echoes).push_back(timing->round_trip_us - timing->device_us);
      }
    }
  }
  samples.round_ratios.push_back(Percentile(beyond, 0.5) / Percentile(echoes, 0.5));
  samples.beyond.insert(samples.beyond.end(), beyond.begin(), beyond.end());
  samples.echoes.insert(samples.echoes.end(), echoes.begin(), echoes.end());
  return absl::OkStatus();
}

Json Report(const Case& bench_case, const Samples& samples) {
  const double echo = Percentile(samples.echoes, 0.5);
  const double busy_echo = Percentile(samples.busy_echoes, 0.5);
  const double beyond = Percentile(samples.beyond, 0.5);
  const auto [least, most] =
      std::minmax_element(samples.round_ratios.begin(), samples.round_ratios.end());
  std::cout << absl::StrFormat("%-34s %6d %6d %9.1f %9.1f %9.1f %9.1f %7.2f %9s %9.1f %7.2f\n",
                               bench_case.name, samples.request_bytes, samples.response_bytes,
                               Percentile(samples.round_trips, 0.5),
                               Percentile(samples.device, 0.5), beyond, echo, beyond / echo,
                               absl::StrFormat("%.2f-%.2f", *least, *most), busy_echo,
                               beyond / busy_echo)
            << std::flush;
  return Json{{"case", bench_case.name},
              {"token_count", bench_case.token_count},
              {"request_bytes", samples.request_bytes},
              {"response_bytes", samples.response_bytes},
              {"call_count", samples.round_trips.size()},
              {"round_trip_us", Percentiles(samples.round_trips)},
              {"device_time_us", Percentiles(samples.device)},
              {"beyond_device_us", Percentiles(samples.beyond)},
              {"echo_us", Percentiles(samples.echoes)},
              {"busy_echo_us", Percentiles(samples.busy_echoes)},
              {"ratio_of_medians", beyond / echo},
              {"round_ratios_of_medians", samples.round_ratios},
              {"busy_ratio_of_medians", beyond / busy_echo}};
}

std::string ProcessorName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

// Runs all cases once, with newly started servers. Returns the daemon's server info.
absl::StatusOr<v1::GetServerInfoResponse> RunRound(const Options& options,
                                                   std::vector<Samples>& samples) {
  const auto servers = ServerPair::Start(options.spillwayd, options.device, options.echo_server);
  if (!servers.ok()) return servers.status();
  const std::string echo_target = (*servers)->echo_target();
  auto channel = grpc::CreateChannel(echo_target, grpc::InsecureChannelCredentials());
  if (!channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(20))) {
    return absl::UnavailableError(absl::StrCat("no echo server at ", echo_target));
  }
  const std::unique_ptr<EchoService::Stub> echo = EchoService::NewStub(channel);
  for (size_t i = 0; i < Cases().size(); ++i) {
    if (!IsWanted(Cases()[i], options)) continue;
    absl::Status status = RunCase(**servers, *echo, Cases()[i], options, samples[i]);
    if (!status.ok()) return status;
  }
  return (*servers)->client().server_info();
}

absl::StatusOr<Json> Run(const Options& options) {
  std::vector<Samples> samples(Cases().size());
  v1::GetServerInfoResponse info;
  for (int round = 0; round < options.round_count; ++round) {
    absl::StatusOr<v1::GetServerInfoResponse> result = RunRound(options, samples);
    if (!result.ok()) return result.status();
    info = *std::move(result);
  }
  std::cout << absl::StrFormat("%-34s %6s %6s %9s %9s %9s %9s %7s %9s %9s %7s\n",
                               "MEDIANS IN MICROSECONDS", "OUT B", "IN B", "ROUND", "DEVICE",
                               "BEYOND", "ECHO", "RATIO", "ROUNDS", "BUSY ECHO", "RATIO");
  Json cases = Json::array();
  for (size_t i = 0; i < Cases().size(); ++i) {
    if (IsWanted(Cases()[i], options)) cases.push_back(Report(Cases()[i], samples[i]));
  }
  return Json{{"benchmark", "rpc"},
              {"date", absl::FormatTime("%Y-%m-%d", absl::Now(), absl::UTCTimeZone())},
              {"processor", ProcessorName()},
              {"core_count", std::thread::hardware_concurrency()},
              {"daemon_version", info.version()},
              {"device", info.devices(0).description()},
              {"round_count", options.round_count},
              {"cases", std::move(cases)}};
}

int Main(int argc, char** argv) {
  const std::filesystem::path here = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  Options options;
  options.spillwayd = (here / "../../daemon/spillwayd").lexically_normal().string();
  options.echo_server = (here / "rpc_echo_server").string();
  CLI::App app("Round trips beyond device time, against a bare gRPC echo.", "rpc_bench");
  app.add_option("--spillwayd", options.spillwayd, "the daemon to start")->capture_default_str();
  app.add_option("--echo-server", options.echo_server, "the echo server to start")
      ->capture_default_str();
  app.add_option("--device", options.device, "of the daemon")->capture_default_str();
  app.add_option("--case", options.cases, "only those whose name holds this");
  app.add_option("--json", options.json_path, "file to write the results to");
  app.add_option("--rounds", options.round_count, "pairs of servers, started afresh")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--blocks", options.block_count, "measured blocks of each kind and round")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--block-size", options.block_size, "calls of a block")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const absl::StatusOr<Json> result = Run(options);
  if (!result.ok()) {
    std::cerr << "rpc_bench: " << result.status() << '\n';
    return 1;
  }
  if (!options.json_path.empty()) {
    std::ofstream file(options.json_path);
    file << result->dump(2) << '\n';
    if (!file.flush()) {
      std::cerr << "rpc_bench: cannot write " << options.json_path << '\n';
      return 1;
    }
  }
  return 0;
}

}  // namespace
}  // namespace spillway::bench

int main(int argc, char** argv) { return spillway::bench::Main(argc, argv); }

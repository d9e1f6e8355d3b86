#include "services/embedded.h"

#include <mutex>

#include "absl/time/time.h"
#include "host/base/status_macros.h"
#include "host/memory/topology.h"
#include "services/config/config.h"
#include "services/convert/decode_step.h"
#include "services/home.h"
#include "services/log/logging.h"
#include "services/server.h"

namespace spillway {

absl::StatusOr<std::unique_ptr<Embedded>> Embedded::Open(
    const std::vector<std::pair<std::string, std::string>>& settings) {
  ASSIGN_OR_RETURN(const Topology topology, DetectTopology());
  ASSIGN_OR_RETURN(const Config config, EmbeddedConfig(settings, topology));
  static std::once_flag logging;
  std::call_once(logging, [&config] { SetUpLogging(config); });
  ASSIGN_OR_RETURN(std::unique_ptr<Home> home, Home::Open(config, "memory.limit"));
  auto server = std::make_unique<Server>(config, home->engine(), Server::Outside());
  grpc::ServerBuilder builder;
  RETURN_IF_ERROR(server->Start(builder));
  return std::unique_ptr<Embedded>(new Embedded(std::move(home), std::move(server)));
}

Embedded::Embedded(std::unique_ptr<Home> home, std::unique_ptr<Server> server)
    : home_(std::move(home)), server_(std::move(server)), channel_(server_->InProcessChannel()) {}

absl::StatusOr<std::unique_ptr<Step>> Embedded::BeginStep(const v1::DecodeStep& step,
                                                          std::string& trace) {
  trace = TraceOf(server_->own_caller(), step);
  return StepFromProto(home_->engine(), server_->own_caller(), step);
}

absl::StatusOr<std::unique_ptr<StreamDecoder>> Embedded::OpenDecoder(std::string_view description,
                                                                     int64_t token_count_max,
                                                                     std::string& trace) {
  ASSIGN_OR_RETURN(const v1::DecodeStep step, ParseDecodeStep(description));
  trace = TraceOf(server_->own_caller(), step);
  return DecoderFromProto(home_->engine(), server_->own_caller(), step, token_count_max);
}

v1::AttendResponse Embedded::ResultsOf(const Job* job) const {
  return spillway::ResultsOf(job, server_->status());
}

std::string Embedded::DetailsOf(const absl::Status& status, std::string_view trace) const {
  return server_->status().ToRpc(status, trace).SerializeAsString();
}

Embedded::~Embedded() {
  server_->BeginDrain(absl::ZeroDuration());
  server_->Stop(absl::ZeroDuration());
  server_.reset();
}

}  // namespace spillway

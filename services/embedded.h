#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "grpcpp/channel.h"

namespace spillway {

namespace v1 {
class AttendResponse;
class DecodeStep;
}  // namespace v1

class Home;
class Server;
class Step;
class StreamDecoder;
struct Job;

// An engine that only this process can reach: the services of the daemon without a socket.
// Thread-safe.
class Embedded {
 public:
  // settings: names as in the daemon's settings file, such as "memory.limit", and values as text.
  // INVALID_ARGUMENT names the setting that is wrong; other errors as Home::Open. Logs errors to
  // standard error, unless log.level says otherwise. The first engine of a process determines the
  // logging of all.
  static absl::StatusOr<std::unique_ptr<Embedded>> Open(
      const std::vector<std::pair<std::string, std::string>>& settings);
  // Cancels running calls, waits until they have ended, and frees everything. Later calls on the
  // channel fail with UNAVAILABLE.
  ~Embedded();

  // May be used by any number of clients.
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }

  // Begins a decode step without gRPC messages. The step must be destroyed before this object.
  // trace: receives the id that the log uses for the step, also if it is refused.
  absl::StatusOr<std::unique_ptr<Step>> BeginStep(const v1::DecodeStep& step, std::string& trace);
  // Opens a decoder on streams of the caller, for the sequences in a serialised v1::DecodeStep. The
  // decoder must be destroyed before this object. trace: as for BeginStep().
  absl::StatusOr<std::unique_ptr<StreamDecoder>> OpenDecoder(std::string_view description,
                                                             int64_t token_count_max,
                                                             std::string& trace);
  // The results of an attend of a step, without tensors. Empty if `job` is null.
  v1::AttendResponse ResultsOf(const Job* job) const;
  // The error as a serialised google.rpc.Status. Also logs it, with `trace`.
  std::string DetailsOf(const absl::Status& status, std::string_view trace) const;

 private:
  Embedded(std::unique_ptr<Home> home, std::unique_ptr<Server> server);

  std::unique_ptr<Home> home_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

}  // namespace spillway

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

class Home;
class Server;
class Step;
class StreamDecoder;
struct Job;

// An engine in this process, which no other reaches: the daemon's services
// without a socket. Thread-safe.
class Embedded {
 public:
  // settings: names as in the daemon's settings file, "memory.limit", and
  // values as text; INVALID_ARGUMENT names the one that is wrong. Errors
  // otherwise as Home::Open. Logs errors to standard error unless log.level says
  // otherwise; of several engines in a process the first decides.
  static absl::StatusOr<std::unique_ptr<Embedded>> Open(
      const std::vector<std::pair<std::string, std::string>>& settings);
  // Cancels what runs, waits for its end and frees everything. Calls on the
  // channel are UNAVAILABLE afterwards.
  ~Embedded();

  // For any number of clients.
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }

  // A decode step that skips messages: a serialised v1::DecodeStep announces it.
  // It goes before this. trace: gets what the log names it by, also where it is refused.
  absl::StatusOr<std::unique_ptr<Step>> BeginStep(std::string_view description, std::string& trace);
  // A decoder of the sequences that a serialised v1::DecodeStep describes, on streams of
  // the caller's. It goes before this. trace: as of BeginStep().
  absl::StatusOr<std::unique_ptr<StreamDecoder>> OpenDecoder(std::string_view description,
                                                             int64_t token_count_max,
                                                             std::string& trace);
  // A serialised v1::AttendResponse without tensors, of a step's attend; empty of null.
  std::string ResultsOf(const Job* job) const;
  // A serialised google.rpc.Status; the error is logged. trace: what the line names.
  std::string DetailsOf(const absl::Status& status, std::string_view trace) const;

 private:
  Embedded(std::unique_ptr<Home> home, std::unique_ptr<Server> server);

  std::unique_ptr<Home> home_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

}  // namespace spillway

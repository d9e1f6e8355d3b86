// Client of spillwayd: models, sequences, appends, attends and statistics.
//
//   auto client = spillway::Client::Connect("unix:/run/user/1000/spillway.sock");
//   if (!client.ok()) return client.status();
//   auto models = (*client)->ListModels();
//
// Requests and answers are the messages of spillway.v1; their fields say
// shapes, units and ranges. Errors are described in spillway/error.h.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "spillway/access.h"
#include "spillway/decode_stream.h"
#include "spillway/kv_chunker.h"
#include "spillway/presence.h"
#include "spillway/v1/admin_service.grpc.pb.h"
#include "spillway/v1/attention_service.grpc.pb.h"
#include "spillway/v1/model_service.grpc.pb.h"
#include "spillway/v1/sequence_service.grpc.pb.h"

namespace spillway {

struct ClientOptions {
  // Time for Connect to reach the daemon and learn what it is.
  absl::Duration connect_timeout = absl::Seconds(5);
  // Deadline of unary calls that name none. Streams have none of themselves.
  absl::Duration call_timeout = absl::Seconds(60);
  // By what the daemon is reached over TCP.
  Access access = DefaultAccess();
};

// How one call may end early.
struct CallOptions {
  // Replaces the client's; absl::InfiniteDuration() for no deadline. Passing
  // it ends the call with DEADLINE_EXCEEDED.
  std::optional<absl::Duration> timeout = std::nullopt;
  // A stop request ends the call with CANCELLED.
  std::stop_token stop = {};
};

// One connection to a daemon. Thread-safe: calls may run at the same time on
// one client. It must outlive the streams that it opened. Sequences that it made without an id,
// and that no other client uses, go a while after it does (the daemon's
// sequences.unnamed_grace_seconds).
class Client {
 public:
  // The major version of the API and daemon that this client speaks.
  static constexpr int kMajorVersion = 0;

  // Connects to an address such as "unix:/path", "127.0.0.1:7311" or "tls:host:7311", see
  // OpenChannel, and reads the server info. UNAVAILABLE if nothing answers there,
  // UNAUTHENTICATED where the daemon takes another token, FAILED_PRECONDITION for a daemon of
  // another major version.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& target,
                                                         const ClientOptions& options = {});

  // The same over a channel that is open already, to an engine in this process
  // (daemon/server/embedded.h) for example.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(std::shared_ptr<grpc::Channel> channel,
                                                         const std::string& target,
                                                         const ClientOptions& options = {});

  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // What the daemon said when this client connected.
  const v1::GetServerInfoResponse& server_info() const { return server_info_; }

  // --- Daemon.

  // Asks again: a boot_id other than server_info()'s means that the daemon
  // restarted and every sequence is gone.
  absl::StatusOr<v1::GetServerInfoResponse> GetServerInfo(const CallOptions& options = {});

  // Memory and work, and those of all models, or of `model` (models/{id}) and its sequences. All
  // pages.
  absl::StatusOr<v1::GetStatisticsResponse> GetStatistics(const std::string& model = "",
                                                          const CallOptions& options = {});

  // Everything that the daemon counts and measures.
  absl::StatusOr<std::vector<v1::MetricFamily>> GetMetrics(const CallOptions& options = {});

  // --- Models. Names are models/{id}.

  // `id` may be empty: the daemon then chooses. Returns the model as created.
  absl::StatusOr<v1::Model> CreateModel(const std::string& id, const v1::Model& model,
                                        const CallOptions& options = {});
  absl::StatusOr<v1::Model> GetModel(const std::string& name, const CallOptions& options = {});
  // All pages.
  absl::StatusOr<std::vector<v1::Model>> ListModels(const CallOptions& options = {});
  absl::Status DeleteModel(const std::string& name, const CallOptions& options = {});
  // Uploads the bytes of one safetensors file; returns the model, now ready.
  absl::StatusOr<v1::Model> UploadHashWeights(const std::string& name, std::string_view file,
                                              const CallOptions& options = {});

  // --- Sequences. Names are sequences/{id}.

  // `id` may be empty. `sequence` needs its model.
  absl::StatusOr<v1::Sequence> CreateSequence(const std::string& id, const v1::Sequence& sequence,
                                              const CallOptions& options = {});
  absl::StatusOr<v1::Sequence> GetSequence(const std::string& name,
                                           const CallOptions& options = {});
  // All pages; of one model, or with an empty name of all.
  absl::StatusOr<std::vector<v1::Sequence>> ListSequences(const std::string& model = "",
                                                          const CallOptions& options = {});
  // `id` of the copy may be empty.
  absl::StatusOr<v1::Sequence> ForkSequence(const std::string& name, const std::string& id = "",
                                            const CallOptions& options = {});
  // Keeps the first `token_count` tokens of every layer.
  absl::StatusOr<v1::Sequence> TruncateSequence(const std::string& name, int64_t token_count,
                                                const CallOptions& options = {});
  // Ends appends to it and truncations, or lets them go on; see SequenceService.SealSequence.
  absl::StatusOr<v1::Sequence> SealSequence(const std::string& name, bool sealed,
                                            const CallOptions& options = {});
  absl::Status DeleteSequence(const std::string& name, const CallOptions& options = {});
  // FAILED_PRECONDITION, reason SEQUENCE_NOT_SEALED, for one that is not sealed, which stays.
  absl::Status DeleteSealedSequence(const std::string& name, const CallOptions& options = {});
  // Saves it to a folder of the daemon's host, by default without a deadline; see
  // SequenceService.SaveSequence for the folder's name and for client_data.
  absl::StatusOr<v1::SaveSequenceResponse> SaveSequence(const std::string& name,
                                                        const std::string& folder,
                                                        const std::string& client_data = "",
                                                        const CallOptions& options = {});
  // Makes a sequence of what was saved, likewise. `id` may be empty, and so may `sequence`, which
  // says what shall be other than it was.
  absl::StatusOr<v1::LoadSequenceResponse> LoadSequence(const std::string& folder,
                                                        const std::string& id = "",
                                                        const v1::Sequence& sequence = {},
                                                        const CallOptions& options = {});

  // --- K/V and attention.

  // Appends the rows, cut into messages of the daemon's size. On failure the
  // chunks before the one that failed stay; the same call again skips what is
  // there and goes on.
  absl::StatusOr<v1::AppendResponse> Append(const KvRows& rows, const CallOptions& options = {});

  // Each result has a status of its own, see ToAbslStatus().
  absl::StatusOr<v1::AttendResponse> Attend(const v1::AttendRequest& request,
                                            const CallOptions& options = {});

  // Opens a stream that appends and attends; by default without a deadline.
  // Failures show at its first Send or Receive.
  std::unique_ptr<DecodeStream> OpenDecode(const CallOptions& options = {});

  absl::StatusOr<v1::SelectResponse> Select(const v1::SelectRequest& request,
                                            const CallOptions& options = {});

  // Calls `on_rows` for every message of the stream, in order. An error that
  // it returns cancels the stream and is returned.
  absl::Status FetchPages(const v1::FetchPagesRequest& request,
                          absl::FunctionRef<absl::Status(v1::FetchPagesResponse)> on_rows,
                          const CallOptions& options = {});

 private:
  Client(std::string target, const ClientOptions& options,
         const std::shared_ptr<grpc::Channel>& channel);

  const std::string target_;
  const ClientOptions options_;
  const PresenceKeeper presence_;
  const std::unique_ptr<v1::AdminService::Stub> admin_;
  const std::unique_ptr<v1::ModelService::Stub> models_;
  const std::unique_ptr<v1::SequenceService::Stub> sequences_;
  const std::unique_ptr<v1::AttentionService::Stub> attention_;
  // Written by Connect alone.
  v1::GetServerInfoResponse server_info_;
};

// $SPILLWAY_TARGET where set, else the socket that a daemon of this user
// listens on unless configured otherwise.
std::string DefaultTarget();

// The gRPC target of an address: a bare absolute path is that of a unix socket,
// "tcp:host:port" is what the daemon's --listen calls host:port.
std::string NormalizeTarget(const std::string& target);

}  // namespace spillway

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
#include "spillway/kv_chunker.h"
#include "spillway/presence.h"
#include "spillway/step_stream.h"
#include "spillway/v1/admin_service.grpc.pb.h"
#include "spillway/v1/attention_service.grpc.pb.h"
#include "spillway/v1/model_service.grpc.pb.h"
#include "spillway/v1/sequence_service.grpc.pb.h"

namespace spillway {

struct ClientOptions {
  // Time limit for Connect, which reaches the daemon and reads its server info.
  absl::Duration connect_timeout = absl::Seconds(5);
  // Deadline of unary calls without a timeout of their own. Streams have no deadline by default.
  absl::Duration call_timeout = absl::Seconds(60);
  // TLS files and token.
  Access access = DefaultAccess();
};

// Limits of one call.
struct CallOptions {
  // Replaces the client's timeout; absl::InfiniteDuration(): no deadline. After the deadline
  // the call ends with DEADLINE_EXCEEDED.
  std::optional<absl::Duration> timeout = std::nullopt;
  // A stop request ends the call with CANCELLED.
  std::stop_token stop = {};
};

// One connection to a daemon. Thread-safe: calls may run at the same time on one client. It must
// outlive the streams that it opened. After it is destroyed, the daemon keeps the sequences that it
// created without an id for a grace time (the daemon's sequences.unnamed_grace_seconds). Then it
// deletes them, unless another client uses them.
class Client {
 public:
  // The major version of the API and daemon that this client speaks.
  static constexpr int kMajorVersion = 0;

  // Connects to an address such as "unix:/path", "127.0.0.1:7311" or "tls:host:7311", see
  // OpenChannel, and reads the server info. UNAVAILABLE if nothing answers there,
  // UNAUTHENTICATED if the daemon does not accept the token, FAILED_PRECONDITION if the daemon has
  // another major version.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& target,
                                                         const ClientOptions& options = {});

  // The same over a channel that is already open, for example to an embedded engine
  // (services/embedded.h).
  static absl::StatusOr<std::unique_ptr<Client>> Connect(std::shared_ptr<grpc::Channel> channel,
                                                         const std::string& target,
                                                         const ClientOptions& options = {});

  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // The server info from when this client connected.
  const v1::GetServerInfoResponse& server_info() const { return server_info_; }

  // --- Daemon.

  // Reads the server info again. If its boot_id differs from that of server_info(), the daemon has
  // restarted, and every sequence is gone, unless store_id is the same.
  absl::StatusOr<v1::GetServerInfoResponse> GetServerInfo(const CallOptions& options = {});

  // Memory and work of the daemon and of all models, or of `model` (models/{id}) and its sequences.
  // Reads all pages.
  absl::StatusOr<v1::GetStatisticsResponse> GetStatistics(const std::string& model = "",
                                                          const CallOptions& options = {});

  // All metrics of the daemon.
  absl::StatusOr<std::vector<v1::MetricFamily>> GetMetrics(const CallOptions& options = {});

  // --- Models. Names are models/{id}.

  // If `id` is empty, the daemon chooses one. Returns the model as created.
  absl::StatusOr<v1::Model> CreateModel(const std::string& id, const v1::Model& model,
                                        const CallOptions& options = {});
  absl::StatusOr<v1::Model> GetModel(const std::string& name, const CallOptions& options = {});
  // Reads all pages.
  absl::StatusOr<std::vector<v1::Model>> ListModels(const CallOptions& options = {});
  absl::Status DeleteModel(const std::string& name, const CallOptions& options = {});
  // Uploads the bytes of one safetensors file. Returns the model, which is then ready.
  absl::StatusOr<v1::Model> UploadHashWeights(const std::string& name, std::string_view file,
                                              const CallOptions& options = {});

  // --- Sequences. Names are sequences/{id}.

  // `id` may be empty. `sequence` must name its model.
  absl::StatusOr<v1::Sequence> CreateSequence(const std::string& id, const v1::Sequence& sequence,
                                              const CallOptions& options = {});
  absl::StatusOr<v1::Sequence> GetSequence(const std::string& name,
                                           const CallOptions& options = {});
  // Sequences of one model, or of all if `model` is empty. Reads all pages.
  absl::StatusOr<std::vector<v1::Sequence>> ListSequences(const std::string& model = "",
                                                          const CallOptions& options = {});
  // `id` is the id of the copy, and may be empty.
  absl::StatusOr<v1::Sequence> ForkSequence(const std::string& name, const std::string& id = "",
                                            const CallOptions& options = {});
  // Keeps the first `token_count` tokens of every layer.
  absl::StatusOr<v1::Sequence> TruncateSequence(const std::string& name, int64_t token_count,
                                                const CallOptions& options = {});
  // Forbids appends and truncations, or allows them again; see SequenceService.SealSequence.
  absl::StatusOr<v1::Sequence> SealSequence(const std::string& name, bool sealed,
                                            const CallOptions& options = {});
  absl::Status DeleteSequence(const std::string& name, const CallOptions& options = {});
  // Deletes it only if it is sealed; otherwise FAILED_PRECONDITION, reason SEQUENCE_NOT_SEALED.
  absl::Status DeleteSealedSequence(const std::string& name, const CallOptions& options = {});
  // Saves it to a folder on the daemon's host, by default without a deadline. See
  // SequenceService.SaveSequence for the folder's name and for client_data.
  absl::StatusOr<v1::SaveSequenceResponse> SaveSequence(const std::string& name,
                                                        const std::string& folder,
                                                        const std::string& client_data = "",
                                                        const CallOptions& options = {});
  // Creates a sequence from a snapshot, by default without a deadline. `id` may be empty. Fields
  // that are set in `sequence` replace the saved ones.
  absl::StatusOr<v1::LoadSequenceResponse> LoadSequence(const std::string& folder,
                                                        const std::string& id = "",
                                                        const v1::Sequence& sequence = {},
                                                        const CallOptions& options = {});

  // Deletes the files of a snapshot.
  absl::Status DeleteSnapshot(const std::string& folder, const CallOptions& options = {});

  // --- K/V and attention.

  // Appends the rows, split into chunks that fit into a message. If a chunk fails, the chunks
  // before it remain. If the same call is repeated, it skips these chunks and continues.
  absl::StatusOr<v1::AppendResponse> Append(const KvRows& rows, const CallOptions& options = {});

  // Each result has its own status; ToAbslStatus() converts it.
  absl::StatusOr<v1::AttendResponse> Attend(const v1::AttendRequest& request,
                                            const CallOptions& options = {});

  // Opens a stream of decode steps, by default without a deadline. If it cannot be opened, its
  // first Send or Receive fails.
  std::unique_ptr<StepStream> OpenSteps(const CallOptions& options = {});

  absl::StatusOr<v1::SelectResponse> Select(const v1::SelectRequest& request,
                                            const CallOptions& options = {});

  // Calls `on_rows` for every message of the stream, in order. If it returns an error, the stream
  // is cancelled, and FetchPages returns that error.
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
  // Written only by Connect.
  v1::GetServerInfoResponse server_info_;
};

// $SPILLWAY_TARGET if it is set, otherwise the default socket of a daemon of this user.
std::string DefaultTarget();

// The gRPC target of an address. An absolute path is a unix socket, and "tcp:host:port" is
// host:port, as in the daemon's --listen.
std::string NormalizeTarget(const std::string& target);

}  // namespace spillway

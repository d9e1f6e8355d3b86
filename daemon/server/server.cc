#include "daemon/server/server.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "daemon/access/token_table.h"
#include "daemon/config/socket_path.h"
#include "daemon/convert/attend.h"
#include "daemon/doorbell/doorbell_server.h"
#include "daemon/engine/holders.h"
#include "daemon/server/acceptor.h"
#include "daemon/server/connection_shield.h"
#include "daemon/server/descriptors.h"
#include "daemon/server/event_log.h"
#include "daemon/server/health_call.h"
#include "daemon/server/home.h"
#include "daemon/server/listeners.h"
#include "daemon/server/local_sockets.h"
#include "daemon/server/logging.h"
#include "daemon/server/memory_watch.h"
#include "daemon/server/sweeper.h"
#include "daemon/server/tls.h"
#include "daemon/services/admin_service.h"
#include "daemon/services/attention_service.h"
#include "daemon/services/call_interceptor.h"
#include "daemon/services/context.h"
#include "daemon/services/health_service.h"
#include "daemon/services/memory_service.h"
#include "daemon/services/model_service.h"
#include "daemon/services/sequence_service.h"
#include "daemon/snapshot/folder_charge.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/resource_quota.h"
#include "host/base/random_id.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

// Limit on the buffers of messages that gRPC holds before a handler sees them.
constexpr int64_t kTransportBytesMax = int64_t{256} << 20;
constexpr int kTransportShare = 8;  // and at most 1/8 of the memory limit
// The name with which a load balancer asks the health service whether to send new work. The empty
// name asks whether the daemon serves at all.
constexpr char kReadiness[] = "readiness";
// Most calls whose requests have not arrived, and the same for calls that need no token. The latter
// come from anybody, so they also have less time, whatever the settings say.
constexpr size_t kWaitingCountMax = 4096;
constexpr size_t kPublicWaitingCountMax = 256;
constexpr std::chrono::seconds kPublicWaitMax{10};
// gRPC's reflection service takes a thread for each call. Its calls beyond this number, of which
// gRPC itself needs a few, are refused.
constexpr int kReflectionThreadCountMax = 16;
constexpr int kBackgroundThreadCount = 2;
// Most calls at the same time that save or load sequences.
constexpr int kFileThreadCountMax = 8;
// Most calls at the same time that create models.
constexpr int kModelThreadCountMax = 32;

bool IsUnix(const Config& config) { return config.listen.starts_with("unix:"); }

// Path of the unix socket; empty if there is none.
std::string UnixPath(const Config& config) {
  const std::string& target = IsUnix(config) ? config.listen : config.local_socket;
  return target.empty() ? "" : target.substr(5);
}

// REQUIRES: there is a unix socket.
std::filesystem::path RegionSocket(const Config& config) {
  return absl::StrCat(UnixPath(config), kRegionsSuffix);
}

RegionTable::Kind RegionsOf(const Config& config) {
  if (config.listen.empty()) return RegionTable::Kind::kProcess;
  return UnixPath(config).empty() ? RegionTable::Kind::kNone : RegionTable::Kind::kSessions;
}

// Each region keeps a descriptor open. A quarter of those that the process may open is for them.
int64_t RegionCountMax() { return std::min<int64_t>(DescriptorLimit() / 4, 16384); }

CallLimits::Values LimitsOf(const Config& config) {
  return {.ttl_seconds = config.ttl_seconds, .stream_idle_seconds = config.stream_idle_seconds};
}

// The client of a server that listens nowhere: its process, which stays connected until it ends.
// Null for other servers.
std::shared_ptr<Presence> OwnClient(const Config& config, Engine& engine) {
  if (!config.listen.empty()) return nullptr;
  std::shared_ptr<Presence> client = engine.ClientOf(RandomId());
  engine.clients().Come(*client);
  return client;
}

}  // namespace

struct Server::Impl {
  Impl(const Config& config, Engine& engine, PastLosses losses, absl::Duration sweep_period,
       std::unique_ptr<Tls> opened_tls, std::unique_ptr<TokenTable> opened_tokens)
      : tls(std::move(opened_tls)),
        tokens(std::move(opened_tokens)),
        boot_id(RandomId()),
        status(
            boot_id, engine.store_id(),
            [this, &engine](const absl::Status& error) {
              // The largest holder of memory may belong to another tenant.
              return tokens == nullptr ? NameHolders(error, engine) : error;
            },
            [this, &engine](const absl::Status& error, const std::string& reason,
                            std::string_view trace) {
              // Before the error is answered: if a device is lost, the daemon restarts in place
              // here, and the client, without an answer, asks the new process.
              if (absl::IsInternal(error)) engine.CheckDevices();
              events.Refused(error, reason, trace);
            }),
        limits(LimitsOf(config)),
        streams(config.open_stream_count_max),
        waiting(kWaitingCountMax),
        public_waiting(kPublicWaitingCountMax),
        regions(RegionsOf(config), &engine.budget(), &engine.accounts(), &engine.device(),
                RegionCountMax()),
        doorbells(&engine, &regions, &status),
        background(kBackgroundThreadCount, 0),
        file_threads(kFileThreadCountMax, "sequences are being saved or loaded"),
        model_threads(kModelThreadCountMax, "models are being created"),
        metrics({.engine = &engine,
                 .calls = &calls,
                 .server = [this] { return Counts(); },
                 .not_ready = [this] { return NotReady(); },
                 .version = SPILLWAY_VERSION,
                 .boot_id = boot_id,
                 .start_time = absl::Now(),
                 .started = SteadyNow(),
                 .losses = std::move(losses)}),
        context{engine,
                OwnClient(config, engine),
                tokens.get(),
                status,
                streams,
                waiting,
                public_waiting,
                regions,
                doorbells,
                background,
                calls,
                metrics,
                file_threads,
                model_threads,
                drain,
                SPILLWAY_VERSION,
                boot_id,
                metrics.sources().start_time,
                limits,
                UnixPath(config).empty() ? "" : RegionSocket(config).filename().string(),
                config.snapshot_folder},
        memory(context),
        models(context),
        sequences(context),
        attention(context),
        admin(context),
        health(context),
        sweeper(sweep_period, engine, events, streams, [this, &engine] {
          Reload();
          engine.CheckDevices();
          KeepSockets();
          regions.Collect();
          ReportReadiness();
          EndSilent();
        }) {}
  ~Impl() {
    events.Slow(context.engine.slow_attends().Take());
    events.Flush();
  }

  // Reads changed files of TLS and tokens again.
  void Reload() {
    if (tls != nullptr) Tell("tls", tls->Reload(), "the certificate of before is shown on");
    if (tokens != nullptr) Tell("tokens", tokens->Reload(), "the earlier tokens stay in force");
  }
  void Tell(const std::string& what, const absl::StatusOr<bool>& reloaded,
            const std::string& instead) {
    if (!reloaded.ok()) {
      events.Warning(what + "_not_reloaded",
                     {{"error", std::string(reloaded.status().message())}, {"instead", instead}});
    } else if (*reloaded) {
      LogInfo(what + "_reloaded");
    }
  }

  // Ends connections and calls whose clients send nothing, and logs the connections that were
  // ended.
  void EndSilent() {
    const auto now = std::chrono::steady_clock::now();
    waiting.EndIdle(now, limits.stream_idle_max());
    public_waiting.EndIdle(now, kPublicWaitMax);
    ConnectionShield& shield = ConnectionShield::Get();
    shield.EndSilent(now);
    for (const ConnectionShield::Ended& ended : shield.TakeEnded()) {
      events.Warning("connection_ended", {{"peer", ended.peer}, {"reason", ended.reason}});
    }
  }

  // Until the server has started, another thread makes the sockets.
  void KeepSockets() {
    if (started && sockets != nullptr) sockets->Keep(*acceptors.front());
  }

  // Why the daemon should get no new work; empty if it is ready.
  std::string NotReady() const {
    if (drain.begun()) {
      const ServerCounts counts = Counts();
      return absl::StrFormat("draining: open calls: %d, open streams: %d, %.0f s left",
                             counts.open_call_count, counts.open_stream_count,
                             drain.seconds_left());
    }
    for (const DeviceWatch::State& state : context.engine.device_watch().states()) {
      if (!state.why.empty()) return absl::StrCat(state.name, " is lost: ", state.why);
      if (state.lost) return absl::StrCat(state.name, " only fails: see the daemon's log");
    }
    return sockets == nullptr ? "" : sockets->trouble();
  }
  void ReportReadiness() {
    if (started) health.SetServing(kReadiness, NotReady().empty());
  }
  ServerCounts Counts() const {
    ServerCounts counts;
    counts.dropped_log_line_count = DroppedLogLineCount();
    counts.ended_connection_count = ConnectionShield::Get().ended_count();
    counts.open_call_count = calls.open_work_count() + doorbells.open_call_count();
    counts.open_stream_count = streams.count();
    if (drain.begun()) counts.drain_seconds_left = drain.seconds_left();
    for (const std::unique_ptr<Acceptor>& acceptor : acceptors) {
      counts.open_connection_count += acceptor->open_connection_count();
      counts.shed_connection_count += acceptor->shed_connection_count();
    }
    return counts;
  }

  const std::unique_ptr<Tls> tls;            // null: no TLS
  const std::unique_ptr<TokenTable> tokens;  // null: calls need no token
  const std::string boot_id;
  EventLog events;
  const StatusConverter status;
  CallLimits limits;
  StreamSet streams;
  WaitingCalls waiting;
  WaitingCalls public_waiting;
  RegionTable regions;
  DoorbellServer doorbells;
  tbb::task_arena background;
  CallThreads file_threads;
  CallThreads model_threads;
  DrainState drain;
  std::atomic<bool> started{false};
  std::atomic<bool> stopping{false};
  CallCounters calls;
  const Metrics metrics;
  const ServiceContext context;
  MemoryService memory;
  ModelService models;
  SequenceService sequences;
  AttentionService attention;
  AdminService admin;
  HealthService health;
  std::unique_ptr<LocalSockets> sockets;  // null: no unix socket
  std::string address;
  std::unique_ptr<grpc::Server> server;
  // One for the unix socket, which is the first, and one for the TCP address, as far as the server
  // listens there.
  // Declared after `server`, to which they pass connections, so that they are destroyed before it.
  std::vector<std::unique_ptr<Acceptor>> acceptors;
  // Null if connections are not shielded.
  std::unique_ptr<MemoryWatch> memory_watch;
  // Declared last, so that it is destroyed first: its thread reads the other members to report
  // whether the server is ready.
  Sweeper sweeper;
};

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Server::~Server() = default;

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const Config& config, Engine& engine,
                                                      PastLosses losses,
                                                      absl::Duration sweep_period) {
  ASSIGN_OR_RETURN(std::unique_ptr<Tls> tls, Tls::Open(config));
  std::unique_ptr<TokenTable> tokens;
  if (!config.tokens_file.empty()) {
    ASSIGN_OR_RETURN(tokens, TokenTable::Open(config.tokens_file, &engine.accounts()));
    if (!config.snapshot_folder.empty() && config.snapshot_folder != "/") {
      ChargeSnapshots(config.snapshot_folder, engine.accounts());
    }
  }
  auto impl = std::make_unique<Impl>(config, engine, std::move(losses), sweep_period,
                                     std::move(tls), std::move(tokens));
  std::vector<Descriptor> local, remote;
  if (const std::string path = UnixPath(config); !path.empty()) {
    ASSIGN_OR_RETURN(const SocketAccess access, SocketAccessOf(config));
    ASSIGN_OR_RETURN(impl->sockets, LocalSockets::Open(path, access, &impl->regions, impl->events));
    local.push_back(impl->sockets->TakeListener());
  }
  if (IsUnix(config)) {
    impl->address = config.listen;
  } else if (!config.listen.empty()) {
    ASSIGN_OR_RETURN(const std::string address, TcpAddress(config.listen, config.allow_remote));
    ASSIGN_OR_RETURN(TcpListeners bound, ListenAtTcp(address));
    remote = std::move(bound.sockets);
    impl->address = absl::StrCat(
        impl->tls == nullptr ? "" : "tls:", address.substr(0, address.rfind(':')), ":", bound.port);
    if (impl->tls == nullptr && !IsLoopback(address)) {
      Log(LogLevel::kWarning, "remote_plaintext",
          {{"address", impl->address},
           {"advice",
            "others on the network can read and change all messages: set tls.certificate"}});
    }
  }
  grpc::ServerBuilder builder;
  const auto accept = [&](std::vector<Descriptor> listeners,
                          const std::shared_ptr<grpc::ServerCredentials>& credentials) {
    if (listeners.empty()) return;
    impl->acceptors.push_back(std::make_unique<Acceptor>(
        std::move(listeners), config.connection_count_max, credentials, builder, impl->events));
  };
  accept(std::move(local), grpc::InsecureServerCredentials());
  accept(std::move(remote),
         impl->tls == nullptr ? grpc::InsecureServerCredentials() : impl->tls->Credentials());
  builder.RegisterService(&impl->memory);
  builder.RegisterService(&impl->models);
  builder.RegisterService(&impl->sequences);
  builder.RegisterService(&impl->attention);
  builder.RegisterService(&impl->admin);
  builder.RegisterService(&impl->health);
  builder.SetMaxReceiveMessageSize(kMessageBytesMax);
  builder.SetMaxSendMessageSize(kMessageBytesMax);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, config.stream_count_max);
  // gRPC would decompress a message completely before it looks at its size, also for a client
  // without a token. A message of 4 MiB may become 4 GiB.
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  grpc::ResourceQuota quota("spillwayd");
  // Waiting requests use gRPC's own memory, which is charged to the share for messages. The quota
  // is larger than this share: if requests could fill it, gRPC would close connections where the
  // daemon should refuse calls.
  const int64_t transport_bytes =
      std::min(kTransportBytesMax, config.memory_limit_bytes / kTransportShare);
  quota.Resize(
      static_cast<size_t>(MemoryBudget::MessageShare(config.memory_limit_bytes) + transport_bytes));
  quota.SetMaxThreads(kReflectionThreadCountMax);
  builder.SetResourceQuota(quota);
  builder.experimental().SetInterceptorCreators(CallInterceptors(impl->calls));
  impl->server = builder.BuildAndStart();
  if (impl->server == nullptr) return absl::UnavailableError("the gRPC server did not start");
  impl->health.SetServing("", true);
  impl->started = true;
  impl->ReportReadiness();
  if (ConnectionShield::Get().enabled()) {
    impl->memory_watch =
        std::make_unique<MemoryWatch>(config.memory_limit_bytes + transport_bytes, impl->events);
  }
  for (const std::unique_ptr<Acceptor>& acceptor : impl->acceptors) acceptor->Start();
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

std::shared_ptr<grpc::Channel> Server::InProcessChannel() {
  return impl_->server->InProcessChannel(grpc::ChannelArguments());
}
const StatusConverter& Server::status() const { return impl_->status; }
const std::string& Server::address() const { return impl_->address; }
Caller Server::own_caller() const { return Caller().With(impl_->context.own_client); }
const Metrics& Server::metrics() const { return impl_->metrics; }
const std::string& Server::boot_id() const { return impl_->boot_id; }

void Server::Apply(const Config& config) {
  impl_->limits.Set(LimitsOf(config));
  impl_->context.engine.slow_attends().SetSeconds(config.slow_attend_ms / 1e3);
  impl_->context.engine.SetUnnamedGrace(UnnamedGraceOf(config));
  impl_->streams.SetCountMax(config.open_stream_count_max);
  impl_->context.engine.registry().SetCountMax(config.model_count_max, config.sequence_count_max);
  for (const std::unique_ptr<Acceptor>& acceptor : impl_->acceptors) {
    acceptor->SetConnectionCountMax(config.connection_count_max);
  }
}

absl::Status Server::CheckServing(absl::Duration timeout) {
  if (impl_->stopping) return absl::OkStatus();
  for (const std::unique_ptr<Acceptor>& acceptor : impl_->acceptors) {
    RETURN_IF_ERROR(acceptor->Check(timeout));
  }
  const absl::Duration turn = absl::FromChrono(impl_->sweeper.since_last_turn());
  if (turn > timeout + impl_->sweeper.period()) {
    return absl::DeadlineExceededError(absl::StrCat(
        "the thread that deletes expired sequences last ran ", absl::FormatDuration(turn), " ago"));
  }
  if (impl_->context.engine.device_watch().all_lost()) {
    return absl::UnavailableError("all devices are lost");
  }
  const absl::Status answered = AskHealth(InProcessChannel(), timeout);
  // A server that shuts down does not answer any more. This is not a failure.
  return impl_->stopping ? absl::OkStatus() : answered;
}

void Server::BeginDrain(absl::Duration grace) {
  impl_->drain.Begin(DrainState::Clock::now() + absl::ToChronoNanoseconds(grace));
  // Connections now end because the daemon ends.
  impl_->context.engine.clients().Freeze();
  impl_->health.SetNothingServing();
  // Calls that wait for codes to be rebuilt would otherwise wait in vain.
  impl_->context.engine.StopRebuilding();
  impl_->streams.Drain();
  impl_->doorbells.Drain();
}

DrainProgress Server::drain_progress() const {
  const ServerCounts counts = impl_->Counts();
  return {.open_call_count = counts.open_call_count,
          .open_stream_count = counts.open_stream_count,
          .seconds_left = impl_->drain.seconds_left()};
}

void Server::Stop(absl::Duration last) {
  // This keeps gRPC's own threads alive until the process ends. Their clean-up would wait up to ten
  // seconds for the thread that polls after a large write.
  grpc_init();
  impl_->stopping = true;
  for (const std::unique_ptr<Acceptor>& acceptor : impl_->acceptors) acceptor->Stop();
  impl_->server->Shutdown(gpr_time_from_micros(absl::ToInt64Microseconds(last), GPR_TIMESPAN));
  impl_->server->Wait();
}

}  // namespace spillway

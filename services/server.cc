#include "services/server.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/holders.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/resource_quota.h"
#include "host/base/descriptor_limit.h"
#include "host/base/random_id.h"
#include "services/admin_service.h"
#include "services/attention_service.h"
#include "services/call_interceptor.h"
#include "services/context.h"
#include "services/convert/attend.h"
#include "services/doorbell/doorbell_server.h"
#include "services/health_call.h"
#include "services/health_service.h"
#include "services/home.h"
#include "services/log/logging.h"
#include "services/memory_service.h"
#include "services/model_service.h"
#include "services/sequence_service.h"
#include "services/sweeper.h"

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

// Each region keeps a descriptor open. A quarter of those that the process may open is for them.
int64_t RegionCountMax() { return std::min<int64_t>(DescriptorLimit() / 4, 16384); }

CallLimits::Values LimitsOf(const Config& config) {
  return {.ttl_seconds = config.ttl_seconds, .stream_idle_seconds = config.stream_idle_seconds};
}

// The client of a server that listens nowhere: its process, which stays connected until it ends.
// Null for other servers.
std::shared_ptr<Presence> OwnClient(RegionTable::Kind regions, Engine& engine) {
  if (regions != RegionTable::Kind::kProcess) return nullptr;
  std::shared_ptr<Presence> client = engine.ClientOf(RandomId());
  engine.clients().Come(*client);
  return client;
}

}  // namespace

struct Server::Impl {
  Impl(const Config& config, Engine& engine, Outside outside_server, absl::Duration period)
      : outside(std::move(outside_server)),
        sweep_period(period),
        stream_count_max(config.stream_count_max),
        message_bytes_max(MemoryBudget::MessageShare(config.memory_limit_bytes)),
        transport_bytes_max(
            std::min(kTransportBytesMax, config.memory_limit_bytes / kTransportShare)),
        boot_id(RandomId()),
        status(
            boot_id, engine.store_id(),
            [this, &engine](const absl::Status& error) {
              // The largest holder of memory may belong to another tenant.
              return outside.tokens == nullptr ? NameHolders(error, engine) : error;
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
        regions(outside.regions, &engine.budget(), &engine.accounts(), &engine.device(),
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
                 .losses = std::move(outside.losses)}),
        context{engine,
                OwnClient(outside.regions, engine),
                outside.tokens,
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
                outside.region_socket,
                config.snapshot_folder},
        memory(context),
        models(context),
        sequences(context),
        attention(context),
        admin(context),
        health(context) {}
  ~Impl() {
    sweeper.reset();
    events.Slow(context.engine.slow_attends().Take());
    events.Flush();
  }

  // A turn of the sweeper.
  void Sweep() {
    context.engine.CheckDevices();
    outside.sweep();
    regions.Collect();
    health.SetServing(kReadiness, NotReady().empty());
    const auto now = std::chrono::steady_clock::now();
    waiting.EndIdle(now, limits.stream_idle_max());
    public_waiting.EndIdle(now, kPublicWaitMax);
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
    return outside.trouble();
  }
  ServerCounts Counts() const {
    ServerCounts counts;
    counts.dropped_log_line_count = DroppedLogLineCount();
    counts.open_call_count = calls.open_work_count() + doorbells.open_call_count();
    counts.open_stream_count = streams.count();
    if (drain.begun()) counts.drain_seconds_left = drain.seconds_left();
    outside.count(counts);
    return counts;
  }

  Outside outside;  // without its losses, which the metrics have
  const absl::Duration sweep_period;
  const int stream_count_max;
  const int64_t message_bytes_max;
  const int64_t transport_bytes_max;
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
  std::unique_ptr<grpc::Server> server;
  // Null before the start. Declared last, so that it is destroyed first: its thread uses the other
  // members.
  std::unique_ptr<Sweeper> sweeper;
};

Server::Server(const Config& config, Engine& engine, Outside outside, absl::Duration sweep_period)
    : impl_(std::make_unique<Impl>(config, engine, std::move(outside), sweep_period)) {}
Server::~Server() = default;

absl::Status Server::Start(grpc::ServerBuilder& builder) {
  builder.RegisterService(&impl_->memory);
  builder.RegisterService(&impl_->models);
  builder.RegisterService(&impl_->sequences);
  builder.RegisterService(&impl_->attention);
  builder.RegisterService(&impl_->admin);
  builder.RegisterService(&impl_->health);
  builder.SetMaxReceiveMessageSize(kMessageBytesMax);
  builder.SetMaxSendMessageSize(kMessageBytesMax);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, impl_->stream_count_max);
  // gRPC would decompress a message completely before it looks at its size, also for a client
  // without a token. A message of 4 MiB may become 4 GiB.
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  grpc::ResourceQuota quota("spillwayd");
  // Waiting requests use gRPC's own memory, which is charged to the share for messages. The quota
  // is larger than this share: if requests could fill it, gRPC would close connections where the
  // daemon should refuse calls.
  quota.Resize(static_cast<size_t>(impl_->message_bytes_max + impl_->transport_bytes_max));
  quota.SetMaxThreads(kReflectionThreadCountMax);
  builder.SetResourceQuota(quota);
  builder.experimental().SetInterceptorCreators(CallInterceptors(impl_->calls));
  impl_->server = builder.BuildAndStart();
  if (impl_->server == nullptr) return absl::UnavailableError("the gRPC server did not start");
  impl_->health.SetServing("", true);
  impl_->health.SetServing(kReadiness, impl_->NotReady().empty());
  impl_->sweeper =
      std::make_unique<Sweeper>(impl_->sweep_period, impl_->context.engine, impl_->events,
                                impl_->streams, [impl = impl_.get()] { impl->Sweep(); });
  return absl::OkStatus();
}

std::shared_ptr<grpc::Channel> Server::InProcessChannel() {
  return impl_->server->InProcessChannel(grpc::ChannelArguments());
}
const StatusConverter& Server::status() const { return impl_->status; }
Caller Server::own_caller() const { return Caller().With(impl_->context.own_client); }
const std::string& Server::boot_id() const { return impl_->boot_id; }
const Metrics& Server::metrics() const { return impl_->metrics; }
EventLog& Server::events() { return impl_->events; }
RegionTable& Server::regions() { return impl_->regions; }
int64_t Server::transport_bytes_max() const { return impl_->transport_bytes_max; }

void Server::Apply(const Config& config) {
  impl_->limits.Set(LimitsOf(config));
  impl_->context.engine.slow_attends().SetSeconds(config.slow_attend_ms / 1e3);
  impl_->context.engine.SetUnnamedGrace(UnnamedGraceOf(config));
  impl_->streams.SetCountMax(config.open_stream_count_max);
  impl_->context.engine.registry().SetCountMax(config.model_count_max, config.sequence_count_max);
}

absl::Status Server::CheckServing(absl::Duration timeout) {
  if (impl_->stopping) return absl::OkStatus();
  const absl::Duration turn = absl::FromChrono(impl_->sweeper->since_last_turn());
  if (turn > timeout + impl_->sweep_period) {
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
  impl_->server->Shutdown(gpr_time_from_micros(absl::ToInt64Microseconds(last), GPR_TIMESPAN));
  impl_->server->Wait();
}

void Server::StopSweeping() { impl_->sweeper.reset(); }

}  // namespace spillway

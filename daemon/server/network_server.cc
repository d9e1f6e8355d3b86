#include "daemon/server/network_server.h"

#include <chrono>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/config/socket_path.h"
#include "daemon/server/connection_shield.h"
#include "daemon/server/listeners.h"
#include "engine/snapshot/folder_charge.h"
#include "grpcpp/grpcpp.h"
#include "host/base/status_macros.h"
#include "services/log/logging.h"

namespace spillway {
namespace {

bool IsUnix(const Config& config) { return config.listen.starts_with("unix:"); }

// Path of the unix socket; empty if there is none.
std::string UnixPath(const Config& config) {
  const std::string& target = IsUnix(config) ? config.listen : config.local_socket;
  return target.empty() ? "" : target.substr(5);
}

// Logs whether a file that is read again was taken. instead: what happens if it was not.
void LogReload(EventLog& events, const std::string& what, const absl::StatusOr<bool>& reloaded,
               const std::string& instead) {
  if (!reloaded.ok()) {
    events.Warning(what + "_not_reloaded",
                   {{"error", std::string(reloaded.status().message())}, {"instead", instead}});
  } else if (*reloaded) {
    LogInfo(what + "_reloaded");
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<NetworkServer>> NetworkServer::Start(const Config& config,
                                                                    Engine& engine,
                                                                    PastLosses losses,
                                                                    absl::Duration sweep_period) {
  std::unique_ptr<NetworkServer> made(new NetworkServer);
  NetworkServer& self = *made;
  ASSIGN_OR_RETURN(self.tls_, Tls::Open(config));
  if (!config.tokens_file.empty()) {
    ASSIGN_OR_RETURN(self.tokens_, TokenTable::Open(config.tokens_file, &engine.accounts()));
    if (!config.snapshot_folder.empty() && config.snapshot_folder != "/") {
      ChargeSnapshots(config.snapshot_folder, engine.accounts());
    }
  }
  const std::string path = UnixPath(config);
  Server::Outside outside;
  outside.regions = path.empty() ? RegionTable::Kind::kNone : RegionTable::Kind::kSessions;
  if (!path.empty()) {
    outside.region_socket =
        std::filesystem::path(absl::StrCat(path, kRegionsSuffix)).filename().string();
  }
  outside.tokens = self.tokens_.get();
  outside.losses = std::move(losses);
  outside.trouble = [&self] { return self.sockets_ == nullptr ? "" : self.sockets_->trouble(); };
  outside.count = [&self](ServerCounts& counts) {
    counts.ended_connection_count = ConnectionShield::Get().ended_count();
    for (const std::unique_ptr<Acceptor>& acceptor : self.acceptors_) {
      counts.open_connection_count += acceptor->open_connection_count();
      counts.shed_connection_count += acceptor->shed_connection_count();
    }
  };
  outside.sweep = [&self] { self.Sweep(); };
  self.server_ = std::make_unique<Server>(config, engine, std::move(outside), sweep_period);
  EventLog& events = self.server_->events();
  grpc::ServerBuilder builder;
  const auto accept = [&](std::vector<Descriptor> listeners,
                          const std::shared_ptr<grpc::ServerCredentials>& credentials) {
    self.acceptors_.push_back(std::make_unique<Acceptor>(
        std::move(listeners), config.connection_count_max, credentials, builder, events));
  };
  if (!path.empty()) {
    ASSIGN_OR_RETURN(const SocketAccess access, SocketAccessOf(config));
    ASSIGN_OR_RETURN(self.sockets_,
                     LocalSockets::Open(path, access, &self.server_->regions(), events));
    std::vector<Descriptor> listeners;
    listeners.push_back(self.sockets_->TakeListener());
    accept(std::move(listeners), grpc::InsecureServerCredentials());
  }
  if (IsUnix(config)) {
    self.address_ = config.listen;
  } else {
    ASSIGN_OR_RETURN(const std::string address, TcpAddress(config.listen, config.allow_remote));
    ASSIGN_OR_RETURN(TcpListeners bound, ListenAtTcp(address));
    self.address_ = absl::StrCat(
        self.tls_ == nullptr ? "" : "tls:", address.substr(0, address.rfind(':')), ":", bound.port);
    if (self.tls_ == nullptr && !IsLoopback(address)) {
      Log(LogLevel::kWarning, "remote_plaintext",
          {{"address", self.address_},
           {"advice",
            "others on the network can read and change all messages: set tls.certificate"}});
    }
    accept(std::move(bound.sockets),
           self.tls_ == nullptr ? grpc::InsecureServerCredentials() : self.tls_->Credentials());
  }
  RETURN_IF_ERROR(self.server_->Start(builder));
  if (ConnectionShield::Get().enabled()) {
    self.memory_watch_ = std::make_unique<MemoryWatch>(
        config.memory_limit_bytes + self.server_->transport_bytes_max(), events);
  }
  for (const std::unique_ptr<Acceptor>& acceptor : self.acceptors_) acceptor->Start();
  return made;
}

NetworkServer::~NetworkServer() {
  // Its turns use the other members.
  if (server_ != nullptr) server_->StopSweeping();
}

void NetworkServer::Sweep() {
  EventLog& events = server_->events();
  // Files of TLS and tokens that have changed.
  if (tls_ != nullptr) {
    LogReload(events, "tls", tls_->Reload(), "the certificate of before is shown on");
  }
  if (tokens_ != nullptr) {
    LogReload(events, "tokens", tokens_->Reload(), "the earlier tokens stay in force");
  }
  if (sockets_ != nullptr) sockets_->Keep(*acceptors_.front());
  ConnectionShield& shield = ConnectionShield::Get();
  shield.EndSilent(std::chrono::steady_clock::now());
  for (const ConnectionShield::Ended& ended : shield.TakeEnded()) {
    events.Warning("connection_ended", {{"peer", ended.peer}, {"reason", ended.reason}});
  }
}

void NetworkServer::Apply(const Config& config) {
  server_->Apply(config);
  for (const std::unique_ptr<Acceptor>& acceptor : acceptors_) {
    acceptor->SetConnectionCountMax(config.connection_count_max);
  }
}

absl::Status NetworkServer::CheckServing(absl::Duration timeout) {
  for (const std::unique_ptr<Acceptor>& acceptor : acceptors_) {
    RETURN_IF_ERROR(acceptor->Check(timeout));
  }
  return server_->CheckServing(timeout);
}

void NetworkServer::Stop(absl::Duration last) {
  for (const std::unique_ptr<Acceptor>& acceptor : acceptors_) acceptor->Stop();
  server_->Stop(last);
}

}  // namespace spillway

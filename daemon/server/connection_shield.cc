#include "daemon/server/connection_shield.h"

#include <netdb.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <array>
#include <utility>

#include "absl/strings/str_cat.h"

namespace spillway {
namespace {

using Connection = ConnectionShield::Connection;

// A system call refuses larger descriptors long before this (fs.nr_open).
constexpr int kDescriptorMax = 1 << 20;
constexpr size_t kEndedMax = 32;  // kept for the log

// By descriptor. Not part of the shield's lock, because every read and close looks here. Untouched
// parts take no memory.
std::array<std::atomic<Connection*>, kDescriptorMax> by_descriptor;

// Of the Admission of this thread.
thread_local std::shared_ptr<Connection> admitted;

// The connection of a TLS session is a shared_ptr in OpenSSL's slot for data of its users. gRPC
// creates the session in the thread that passes the connection to it.
void BeginSession(void*, void*, CRYPTO_EX_DATA* data, int index, long, void*) {
  if (admitted == nullptr) return;
  admitted->is_tls = true;
  CRYPTO_set_ex_data(data, index, new std::shared_ptr<Connection>(admitted));
}
void EndSession(void*, void* slot, CRYPTO_EX_DATA*, int, long, void*) {
  delete static_cast<std::shared_ptr<Connection>*>(slot);
}
int SessionIndex() {
  static const int index = SSL_get_ex_new_index(0, nullptr, BeginSession, nullptr, EndSession);
  return index;
}

// The client of a connection, for people.
std::string PeerOf(int fd) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return "unknown";
  if (address.ss_family == AF_UNIX) {
    ucred process = {};
    size = sizeof(process);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &process, &size) != 0) return "unknown";
    return absl::StrCat("pid ", process.pid, ", uid ", process.uid);
  }
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (getnameinfo(reinterpret_cast<sockaddr*>(&address), size, host.data(), host.size(),
                  port.data(), port.size(), NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "unknown";
  }
  return absl::StrCat(host.data(), " port ", port.data());
}

}  // namespace

ConnectionShield& ConnectionShield::Get() {
  static auto* const shield = new ConnectionShield;
  return *shield;
}

void ConnectionShield::Enable(int early_stream_count_max) {
  SessionIndex();
  early_stream_count_max_ = early_stream_count_max;
}

ConnectionShield::Admission::Admission(int fd) {
  ConnectionShield& shield = Get();
  const int early_stream_count_max = shield.early_stream_count_max_;
  if (early_stream_count_max == 0 || fd >= kDescriptorMax) return;
  admitted = std::make_shared<Connection>(fd, early_stream_count_max);
  const MutexLock lock(shield.mutex_);
  by_descriptor[fd] = admitted.get();
  shield.open_[fd] = admitted;
}
ConnectionShield::Admission::~Admission() { admitted = nullptr; }

Connection* ConnectionShield::Find(int fd) {
  return fd >= 0 && fd < kDescriptorMax ? by_descriptor[fd].load(std::memory_order_acquire)
                                        : nullptr;
}

Connection* ConnectionShield::FindSession(const SSL* session) {
  const void* const slot = SSL_get_ex_data(session, SessionIndex());
  return slot == nullptr ? nullptr : static_cast<const std::shared_ptr<Connection>*>(slot)->get();
}

bool ConnectionShield::Take(Connection& connection, std::string_view bytes) {
  const int64_t stream_count = connection.frames.stream_count();
  if (const char* const why = connection.frames.Take(bytes, Clock::now()); why != nullptr) {
    const MutexLock lock(mutex_);
    End(connection, why);
  }
  connection.recent_stream_count += connection.frames.stream_count() - stream_count;
  connection.acknowledged = connection.frames.acknowledged();
  return !connection.ended;
}

void ConnectionShield::Forget(Connection& connection) {
  const MutexLock lock(mutex_);
  by_descriptor[connection.fd] = nullptr;
  open_.erase(connection.fd);
}

void ConnectionShield::EndSilent(Clock::time_point now) {
  const MutexLock lock(mutex_);
  for (const auto& [fd, connection] : open_) {
    connection->recent_stream_count -= connection->recent_stream_count / 8;
    if (connection->acknowledged || now - connection->accepted < kGreetingMax) continue;
    End(*connection, absl::StrCat("it did not acknowledge the server's SETTINGS within ",
                                  kGreetingMax.count(), " s"));
  }
}

bool ConnectionShield::EndBusiest(const std::string& reason) {
  const MutexLock lock(mutex_);
  Connection* busiest = nullptr;
  for (const auto& [fd, connection] : open_) {
    if (connection->ended) continue;
    if (busiest == nullptr || connection->recent_stream_count > busiest->recent_stream_count) {
      busiest = connection.get();
    }
  }
  if (busiest == nullptr) return false;
  End(*busiest, reason);
  return true;
}

std::vector<ConnectionShield::Ended> ConnectionShield::TakeEnded() {
  const MutexLock lock(mutex_);
  return std::exchange(ended_, {});
}

void ConnectionShield::End(Connection& connection, std::string reason) {
  if (connection.ended.exchange(true)) return;
  ++ended_count_;
  if (ended_.size() < kEndedMax) ended_.push_back({PeerOf(connection.fd), std::move(reason)});
  // gRPC notices and closes the descriptor. Forget() waits for this lock, so it is still ours.
  shutdown(connection.fd, SHUT_RDWR);
}

}  // namespace spillway

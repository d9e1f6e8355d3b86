#include "daemon/server/acceptor.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/server/connection_shield.h"
#include "host/base/descriptor_limit.h"

namespace spillway {
namespace {

// Pause between two attempts to accept while too few descriptors are free.
constexpr int kRetryMs = 50;

// The inode of a descriptor's socket; 0 if the descriptor is not a socket.
uint64_t SocketOf(int fd) {
  struct stat info {};
  return fstat(fd, &info) == 0 && S_ISSOCK(info.st_mode) ? info.st_ino : 0;
}

}  // namespace

Acceptor::Acceptor(std::vector<Descriptor> listeners, int64_t connection_count_max,
                   const std::shared_ptr<grpc::ServerCredentials>& credentials,
                   grpc::ServerBuilder& builder, EventLog& events)
    : connection_count_max_(connection_count_max),
      server_(builder.experimental().AddExternalConnectionAcceptor(
          grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, credentials)),
      events_(events),
      listeners_(std::move(listeners)),
      wake_(eventfd(0, EFD_CLOEXEC)) {}

Acceptor::~Acceptor() { Stop(); }

void Acceptor::Start() {
  thread_ = std::thread([this] { Run(); });
}

void Acceptor::Stop() {
  if (thread_.joinable()) {
    stopping_ = true;
    Wake();
    thread_.join();
  }
  const MutexLock lock(mutex_);
  listeners_.clear();
}

void Acceptor::Replace(Descriptor listener) {
  const MutexLock lock(mutex_);
  if (listeners_.empty()) return;
  // Under the same number, which the thread polls again after it wakes.
  if (dup3(listener.get(), listeners_.front().get(), O_CLOEXEC) >= 0) Wake();
}

void Acceptor::Wake() {
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof(one));
}

absl::Status Acceptor::Check(absl::Duration timeout) {
  const auto deadline = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(timeout);
  const MutexLock lock(mutex_);
  const int64_t before = wake_count_;
  Wake();
  while (wake_count_ == before && !stopped_) {
    if (woken_.WaitUntil(mutex_, deadline)) continue;
    return absl::DeadlineExceededError(
        absl::StrCat("the thread that accepts connections has not answered for ",
                     absl::FormatDuration(timeout)));
  }
  return absl::OkStatus();
}

int64_t Acceptor::open_connection_count() {
  const MutexLock lock(mutex_);
  ForgetClosed();
  return static_cast<int64_t>(sockets_.size());
}

void Acceptor::Run() {
  std::vector<pollfd> ready = {{wake_.get(), POLLIN, 0}};
  for (const Descriptor& listener : listeners_) ready.push_back({listener.get(), POLLIN, 0});
  bool is_short = false;
  for (;;) {
    // While too few descriptors are free, do not poll the listeners: they may stay ready all the
    // time.
    const int count = poll(ready.data(), is_short ? 1 : ready.size(), is_short ? kRetryMs : -1);
    if (count < 0) continue;
    if (ready[0].revents != 0) {
      uint64_t count_of_wakes = 0;
      (void)!read(wake_.get(), &count_of_wakes, sizeof(count_of_wakes));
      const MutexLock lock(mutex_);
      ++wake_count_;
      stopped_ = stopping_;
      woken_.NotifyAll();
      if (stopped_) return;
    }
    bool was_short = std::exchange(is_short, false);
    for (size_t i = 1; i < ready.size() && !is_short; ++i) {
      if (was_short || ready[i].revents != 0) is_short = !Accept(ready[i].fd);
    }
    if (is_short && !was_short) {
      events_.Warning("descriptors_short",
                      {{"connections", absl::StrCat(open_connection_count())},
                       {"advice", "raise the process's limit of open files (ulimit -n)"}});
    }
  }
}

bool Acceptor::Accept(int listener) {
  if (IsShortOfDescriptors(DescriptorUse::kConnection)) return false;
  Descriptor connection(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!connection.valid()) {
    return errno != EMFILE && errno != ENFILE && errno != ENOMEM && errno != ENOBUFS;
  }
  bool is_shed = false;
  {
    const MutexLock lock(mutex_);
    // If there is an older entry with this number, its connection is closed.
    sockets_[connection.get()] = SocketOf(connection.get());
    if (static_cast<int64_t>(sockets_.size()) > connection_count_max_) ForgetClosed();
    if (static_cast<int64_t>(sockets_.size()) > connection_count_max_) {
      sockets_.erase(connection.get());
      ++shed_connection_count_;
      is_shed = true;
    }
  }
  if (is_shed) {
    // Logged before the connection is closed, so that a client that notices finds the reason there.
    events_.Warning("connection_shed",
                    {{"connection_count_max", absl::StrCat(connection_count_max_.load())}});
    return true;
  }
  const ConnectionShield::Admission admission(connection.get());
  grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters handed;
  handed.listener_fd = listener;
  handed.fd = connection.Release();
  server_->HandleNewConnection(&handed);
  return true;
}

void Acceptor::ForgetClosed() {
  std::erase_if(sockets_, [](const auto& entry) { return SocketOf(entry.first) != entry.second; });
}

}  // namespace spillway

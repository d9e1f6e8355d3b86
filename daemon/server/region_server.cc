#include "daemon/server/region_server.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

constexpr size_t kNameBytesMax = 256;
constexpr std::string_view kCollection = "regions/";
// Most sessions at the same time; further connections are closed at once.
constexpr size_t kSessionCountMax = 1024;
// Pause between two attempts to accept while too few descriptors are free.
constexpr int kRetryMs = 50;

absl::Status Failed(const std::string& what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

// A pidfd of the process at the other end; not valid if the kernel does not report the process.
Descriptor ProcessOf(int connection) {
  ucred peer = {};
  socklen_t size = sizeof(peer);
  if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.pid <= 0) {
    return Descriptor();
  }
  return Descriptor(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
}

// Sends one message, with `descriptor` unless that is -1. If the client does not read, the message
// is lost.
void Send(int connection, const std::string& text, int descriptor = -1) {
  iovec part = {const_cast<char*>(text.data()), text.size()};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  if (descriptor >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  }
  (void)sendmsg(connection, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

class RegionServer::Loop {
 public:
  explicit Loop(RegionTable* regions) : regions_(regions) {}
  ~Loop() {
    // A client may still be reading the answer to its last call at a doorbell.
    regions_->KeepContent();
    for (const auto& [fd, session] : sessions_) regions_->CloseSession(session.id);
  }

  absl::Status Listen(Descriptor listener) {
    epoll_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
    stop_ = Descriptor(eventfd(0, EFD_CLOEXEC));
    if (!epoll_.valid() || !stop_.valid()) return Failed("regions");
    listener_ = std::move(listener);
    Watch(listener_.get());
    Watch(stop_.get());
    return absl::OkStatus();
  }

  void Run() {
    for (;;) {
      std::array<epoll_event, 16> events;
      const int count =
          epoll_wait(epoll_.get(), events.data(), events.size(), is_short_ ? kRetryMs : -1);
      if (std::exchange(is_short_, false)) Watch(listener_.get());
      for (int i = 0; i < count; ++i) {
        const int fd = events[i].data.fd;
        if (fd == stop_.get()) return;
        if (fd == listener_.get()) {
          Accept();
          continue;
        }
        const auto process = processes_.find(fd);
        if (process == processes_.end() && Serve(fd)) continue;
        Close(process == processes_.end() ? fd : process->second);
        // Descriptor numbers in the other events may belong to new sessions by then: wait for new
        // events.
        break;
      }
    }
  }

  // Under the same number, so that the thread needs no notice.
  void Replace(const Descriptor& listener) {
    if (dup3(listener.get(), listener_.get(), O_CLOEXEC) >= 0) Watch(listener_.get());
  }

  void Stop() {
    const uint64_t one = 1;
    (void)!write(stop_.get(), &one, sizeof(one));
  }

 private:
  struct Session {
    Descriptor connection;
    Descriptor process;
    std::string id;
  };

  void Watch(int fd) {
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.fd = fd;
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  }

  void Accept() {
    Descriptor connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!connection.valid() && (errno == EMFILE || errno == ENFILE)) {
      // The listener stays ready as long as no descriptor is free. So do not watch it until the
      // next retry.
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
      is_short_ = true;
    }
    if (!connection.valid() || sessions_.size() >= kSessionCountMax) return;
    const int fd = connection.get();
    Session session{std::move(connection), ProcessOf(fd), regions_->OpenSession()};
    Send(fd, session.id);
    Watch(fd);
    if (session.process.valid()) {
      Watch(session.process.get());
      processes_.emplace(session.process.get(), fd);
    }
    sessions_.emplace(fd, std::move(session));
  }

  // Answers one message; false if the connection has ended.
  bool Serve(int fd) {
    std::array<char, kNameBytesMax> buffer;
    const ssize_t size = recv(fd, buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (size < 0) return errno == EAGAIN || errno == EINTR;
    if (size == 0) return false;
    const std::string name(buffer.data(), static_cast<size_t>(size));
    const absl::StatusOr<std::vector<std::shared_ptr<Region>>> regions =
        regions_->ListOf(sessions_.at(fd).id);
    if (regions.ok() && name.starts_with(kCollection)) {
      for (const std::shared_ptr<Region>& region : *regions) {
        if (region->id != name.substr(kCollection.size())) continue;
        SendDescriptor(fd, *region);
        return true;
      }
    }
    Send(fd, "this session has no such region");
    return true;
  }

  static void SendDescriptor(int fd, const Region& region) {
    if (region.memory == nullptr) {
      return Send(fd, "this region is in GPU memory: AttachRegion returned its handle");
    }
    const absl::StatusOr<Descriptor> shared = region.memory->Share();
    if (!shared.ok()) return Send(fd, std::string(shared.status().message()));
    Send(fd, "ok", shared->get());
  }

  // Closing the descriptors also removes them from epoll.
  void Close(int fd) {
    const auto session = sessions_.find(fd);
    if (session == sessions_.end()) return;
    regions_->CloseSession(session->second.id);
    processes_.erase(session->second.process.get());
    sessions_.erase(session);
  }

  RegionTable* const regions_;
  Descriptor listener_, epoll_, stop_;
  bool is_short_ = false;            // too few descriptors are free
  std::map<int, Session> sessions_;  // key: descriptor of the connection
  std::map<int, int> processes_;     // key: pidfd; value: descriptor of the connection
};

absl::StatusOr<std::unique_ptr<RegionServer>> RegionServer::Start(Descriptor listener,
                                                                  RegionTable* regions) {
  auto loop = std::make_unique<Loop>(regions);
  RETURN_IF_ERROR(loop->Listen(std::move(listener)));
  return std::unique_ptr<RegionServer>(new RegionServer(std::move(loop)));
}

RegionServer::RegionServer(std::unique_ptr<Loop> loop)
    : loop_(std::move(loop)), thread_([this] { loop_->Run(); }) {}

RegionServer::~RegionServer() {
  loop_->Stop();
  thread_.join();
}

void RegionServer::Replace(Descriptor listener) { loop_->Replace(listener); }

}  // namespace spillway

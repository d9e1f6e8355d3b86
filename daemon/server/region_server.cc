#include "daemon/server/region_server.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <compare>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "host/base/descriptor_limit.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

constexpr size_t kNameBytesMax = 256;
constexpr std::string_view kCollection = "regions/";
// Pause between two attempts to accept while too few descriptors are free.
constexpr int kFullRetryMs = 50;

using Clock = std::chrono::steady_clock;

absl::Status Failed(const std::string& what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

// The process at the other end of a connection. If the kernel does not report it, id is 0, and all
// processes of a user are equal.
struct Peer {
  explicit Peer(int connection) {
    ucred credentials = {};
    socklen_t size = sizeof(credentials);
    if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) return;
    id = std::max(credentials.pid, 0);
    if (id == 0) user = credentials.uid;
  }
  // A pidfd of it; not valid if the kernel does not report the process.
  Descriptor Open() const {
    return Descriptor(id == 0 ? -1 : static_cast<int>(syscall(SYS_pidfd_open, id, 0)));
  }
  friend auto operator<=>(const Peer&, const Peer&) = default;

  pid_t id = 0;
  uid_t user = 0;
};

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
  Loop(const Limits& limits, RegionTable* regions) : limits_(limits), regions_(regions) {}
  ~Loop() {
    // A client may still be reading the answer to its last call at a doorbell.
    regions_->KeepContent();
    for (const auto& [number, session] : sessions_) regions_->CloseSession(session.id);
  }

  absl::Status Listen(Descriptor listener) {
    epoll_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
    stop_ = Descriptor(eventfd(0, EFD_CLOEXEC));
    if (!epoll_.valid() || !stop_.valid()) return Failed("regions");
    listener_ = std::move(listener);
    Watch(listener_.get(), kListenerEvent);
    Watch(stop_.get(), kStopEvent);
    return absl::OkStatus();
  }

  void Run() {
    for (;;) {
      std::array<epoll_event, 16> events;
      const int count = epoll_wait(epoll_.get(), events.data(), events.size(), TimeoutMs());
      if (std::exchange(is_short_, false)) Watch(listener_.get(), kListenerEvent);
      for (int i = 0; i < count; ++i) {
        const uint64_t event = events[i].data.u64;
        if (event == kStopEvent) return;
        if (event == kListenerEvent) {
          Accept();
          continue;
        }
        // Earlier events of this batch may have ended the session.
        const auto session = sessions_.find(event & ~kProcessBit);
        if (session == sessions_.end()) continue;
        if ((event & kProcessBit) != 0 || !Serve(session->second)) Close(session);
      }
      CloseNeverNamed();
    }
  }

  // Under the same number, so that the thread needs no notice.
  void Replace(const Descriptor& listener) {
    if (dup3(listener.get(), listener_.get(), O_CLOEXEC) >= 0) {
      Watch(listener_.get(), kListenerEvent);
    }
  }

  void Stop() {
    const uint64_t one = 1;
    (void)!write(stop_.get(), &one, sizeof(one));
  }

 private:
  struct Session {
    Descriptor connection;
    Peer peer;
    Descriptor process;
    std::string id;
  };
  // Key: the number of the session, which is also what its events have. Numbers grow.
  using Sessions = std::map<uint64_t, Session>;

  // Events of the two other descriptors, and the bit of events that are about a session's process.
  static constexpr uint64_t kListenerEvent = 0;
  static constexpr uint64_t kStopEvent = 1;
  static constexpr uint64_t kProcessBit = 1;
  static constexpr uint64_t kNumberStep = 2;

  void Watch(int fd, uint64_t about) {
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.u64 = about;
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  }

  int TimeoutMs() const {
    if (is_short_) return kFullRetryMs;
    if (new_.empty()) return -1;
    const auto wait =
        std::chrono::ceil<std::chrono::milliseconds>(new_.begin()->second - Clock::now());
    return static_cast<int>(std::clamp<int64_t>(wait.count(), 0, limits_.unused_max.count()));
  }

  void Accept() {
    // The listener stays ready as long as no descriptor is free. So do not watch it until the next
    // retry.
    if (IsShortOfDescriptors(DescriptorUse::kSession) && !CloseUnused(nullptr)) return Pause();
    Descriptor connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!connection.valid()) {
      if (errno == EMFILE || errno == ENFILE) Pause();
      return;
    }
    const Peer peer(connection.get());
    const auto of_peer = counts_.find(peer);
    if (of_peer != counts_.end() && of_peer->second >= limits_.peer_session_count_max &&
        !CloseUnused(&peer)) {
      return;
    }
    if (std::ssize(sessions_) >= limits_.session_count_max && !CloseUnused(nullptr)) return;
    const uint64_t number = next_number_;
    next_number_ += kNumberStep;
    Session session{std::move(connection), peer, peer.Open(), regions_->OpenSession()};
    Send(session.connection.get(), session.id);
    Watch(session.connection.get(), number);
    if (session.process.valid()) Watch(session.process.get(), number | kProcessBit);
    ++counts_[peer];
    new_.emplace(number, Clock::now() + limits_.unused_max);
    sessions_.emplace(number, std::move(session));
  }

  void Pause() {
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
    is_short_ = true;
  }

  // Answers one message; false if the connection has ended.
  bool Serve(const Session& session) {
    const int fd = session.connection.get();
    std::array<char, kNameBytesMax> buffer;
    const ssize_t size = recv(fd, buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (size < 0) return errno == EAGAIN || errno == EINTR;
    if (size == 0) return false;
    const std::string name(buffer.data(), static_cast<size_t>(size));
    const absl::StatusOr<std::vector<std::shared_ptr<Region>>> regions =
        regions_->ListOf(session.id);
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

  // Closes the session that is missed least, if there is one: of this peer, or of any if it is
  // null. Returns whether it did.
  bool CloseUnused(const Peer* peer) {
    const Clock::time_point before = Clock::now() - limits_.unused_max;
    auto least = sessions_.end();
    int64_t count = 0;
    for (auto session = sessions_.begin(); session != sessions_.end(); ++session) {
      const int64_t count_of_peer = counts_.at(session->second.peer);
      if ((peer != nullptr && session->second.peer != *peer) || count_of_peer <= count) continue;
      const RegionTable::SessionUse use = regions_->UseOf(session->second.id);
      if (use.has_regions || (use.named && *use.named > before)) continue;
      least = session;
      count = count_of_peer;
    }
    if (least == sessions_.end()) return false;
    Close(least);
    return true;
  }

  // Closes the sessions that no call has named in time.
  void CloseNeverNamed() {
    const Clock::time_point now = Clock::now();
    while (!new_.empty() && new_.begin()->second <= now) {
      const auto session = sessions_.find(new_.begin()->first);
      new_.erase(new_.begin());
      if (!regions_->UseOf(session->second.id).named) Close(session);
    }
  }

  // Closing the descriptors also removes them from epoll.
  void Close(Sessions::iterator session) {
    regions_->CloseSession(session->second.id);
    const auto count = counts_.find(session->second.peer);
    if (--count->second == 0) counts_.erase(count);
    new_.erase(session->first);
    sessions_.erase(session);
  }

  const Limits limits_;
  RegionTable* const regions_;
  Descriptor listener_, epoll_, stop_;
  bool is_short_ = false;  // too few descriptors are free
  uint64_t next_number_ = kNumberStep;
  Sessions sessions_;
  std::map<Peer, int64_t> counts_;             // of the sessions
  std::map<uint64_t, Clock::time_point> new_;  // until when a call must have named these sessions
};

RegionServer::Limits RegionServer::Limits::OfProcess() {
  Limits limits;
  limits.session_count_max = std::min(limits.session_count_max, DescriptorLimit() / 8);
  limits.peer_session_count_max =
      std::min(limits.peer_session_count_max, std::max<int64_t>(limits.session_count_max / 2, 1));
  return limits;
}

absl::StatusOr<std::unique_ptr<RegionServer>> RegionServer::Start(Descriptor listener,
                                                                  const Limits& limits,
                                                                  RegionTable* regions) {
  auto loop = std::make_unique<Loop>(limits, regions);
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

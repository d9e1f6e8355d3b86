#include "lib/daemon_session.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/client_context.h"
#include "host/base/status_macros.h"
#include "services/convert/tensor.h"
#include "spillway/presence.h"
#include "spillway/v1/admin_service.grpc.pb.h"
#include "spillway/v1/memory_service.grpc.pb.h"

namespace spillway {
namespace {

constexpr size_t kNameBytesMax = 256;
constexpr std::string_view kUnix = "unix:";
// Timeout of the calls that attach and detach doorbells.
constexpr std::chrono::seconds kTimeout{30};
// A waiting thread checks this often whether the daemon is still running.
constexpr std::chrono::milliseconds kLookInterval{100};
// How long the daemon may take to answer on a session's socket. It waits for nothing, except that a
// daemon with too few descriptors accepts a session only when others have closed, or in 30 s.
constexpr timeval kAnswerMax = {.tv_sec = 60, .tv_usec = 0};
constexpr char kDetails[] = "spillway/rpc";
// Number of doorbells kept for later steps. Each one occupies a thread of the daemon.
constexpr size_t kIdleMax = 4;

// Calls a function of the system, and calls it again whenever a signal interrupts it.
template <typename Call>
auto Uninterrupted(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// Calls a method with one request. reached: the daemon has answered before.
template <typename Stub, typename Request, typename Response>
absl::Status Called(Stub& stub,
                    grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const Request& request, Response& response, bool reached,
                    const std::string& client_id) {
  grpc::ClientContext context;
  context.AddMetadata(kClientMetadata, client_id);
  // If the daemon has restarted, the channel may still be reconnecting.
  context.set_wait_for_ready(reached);
  context.set_deadline(gpr_time_from_seconds(kTimeout.count(), GPR_TIMESPAN));
  return FromDaemon((stub.*method)(&context, request, &response));
}

}  // namespace

std::string DaemonDetails(const absl::Status& status) {
  const auto details = status.GetPayload(kDetails);
  return details ? std::string(*details) : "";
}

absl::Status FromDaemon(const grpc::Status& status) {
  absl::Status made(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  if (!status.error_details().empty()) {
    made.SetPayload(kDetails, absl::Cord(status.error_details()));
  }
  return made;
}

absl::Status FromDaemon(const google::rpc::Status& status) {
  absl::Status made(static_cast<absl::StatusCode>(status.code()), status.message());
  made.SetPayload(kDetails, absl::Cord(status.SerializeAsString()));
  return made;
}

absl::Status NoSense() { return absl::InternalError("the daemon's answer is not valid"); }

absl::StatusOr<std::shared_ptr<SessionSocket>> SessionSocket::Connect(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::UnimplementedError(
        absl::StrCat(path, " is longer than the path of a socket may be"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  Descriptor made(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!made.valid()) return absl::UnavailableError(absl::StrCat("socket: ", std::strerror(errno)));
  for (const int limit : {SO_RCVTIMEO, SO_SNDTIMEO}) {
    setsockopt(made.get(), SOL_SOCKET, limit, &kAnswerMax, sizeof(kAnswerMax));
  }
  std::array<char, kNameBytesMax> session;
  ssize_t size = -1;
  const auto* const where = reinterpret_cast<const sockaddr*>(&address);
  if (Uninterrupted([&] { return connect(made.get(), where, sizeof(address)); }) == 0) {
    size = Uninterrupted([&] { return recv(made.get(), session.data(), session.size(), 0); });
  }
  if (size < 0) return absl::UnavailableError(absl::StrCat(path, ": ", std::strerror(errno)));
  if (size == 0) {
    return absl::ResourceExhaustedError(absl::StrCat(path, ": the daemon has too many sessions"));
  }
  return std::shared_ptr<SessionSocket>(
      new SessionSocket(std::move(made), std::string(session.data(), static_cast<size_t>(size))));
}

bool SessionSocket::alive() const {
  pollfd socket = {socket_.get(), POLLRDHUP, 0};
  return poll(&socket, 1, 0) <= 0;
}

absl::StatusOr<Descriptor> SessionSocket::Receive(const std::string& region) const {
  std::array<char, kNameBytesMax> text;
  iovec part = {text.data(), text.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control;
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t size = Uninterrupted(
      [&] { return send(socket_.get(), region.data(), region.size(), MSG_NOSIGNAL); });
  if (size >= 0) {
    size = Uninterrupted([&] { return recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC); });
  }
  if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    return absl::DeadlineExceededError(
        absl::StrCat("the daemon has not passed ", region, " in ", kAnswerMax.tv_sec, " s"));
  }
  if (size <= 0) return absl::UnavailableError("the daemon has ended the session");
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) {
    return absl::NotFoundError(absl::StrCat(region, " was not passed to this process: ",
                                            std::string(text.data(), static_cast<size_t>(size))));
  }
  int fd;
  std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
  return Descriptor(fd);
}

absl::StatusOr<std::unique_ptr<Doorbell>> Doorbell::Map(std::shared_ptr<SessionSocket> socket,
                                                        const v1::Region& region,
                                                        const Descriptor& descriptor) {
  ASSIGN_OR_RETURN(std::unique_ptr<MappedRegion> mapped, MappedRegion::OfHost(region, descriptor));
  return std::unique_ptr<Doorbell>(new Doorbell(std::move(socket), std::move(mapped)));
}

Doorbell::Doorbell(std::shared_ptr<SessionSocket> socket, std::unique_ptr<MappedRegion> region)
    : socket_(std::move(socket)),
      region_(std::move(region)),
      memory_(*static_cast<DoorbellMemory*>(region_->address())),
      data_(std::span(static_cast<std::byte*>(region_->address()),
                      static_cast<size_t>(region_->byte_count()))
                .subspan(DoorbellMemory::kDataOffset)) {}

bool Doorbell::answered() const {
  return memory_.answered.number.load(std::memory_order_acquire) == rung_;
}

absl::StatusOr<bool> Doorbell::Await(BellWaiter::Clock::time_point deadline) {
  // The daemon answers with the number of the call. Any other number belongs to an earlier call:
  // the last one, or, if that was abandoned, the one before.
  while (!broken_ && !answered()) {
    const uint32_t before = memory_.answered.number.load(std::memory_order_acquire);
    if (before == rung_) break;
    const auto until = std::min(deadline, BellWaiter::Clock::now() + kLookInterval);
    if (waiter_.Await(memory_.answered, before, until)) continue;
    broken_ = !socket_->alive();
    if (broken_ || deadline == BellWaiter::Clock::time_point::max()) continue;
    // If the wait ended early, a signal interrupted it.
    const auto now = BellWaiter::Clock::now();
    if (now < until || now >= deadline) return false;
  }
  if (broken_) return absl::UnavailableError("the daemon is gone");
  abandoned_ = false;
  return true;
}

void Doorbell::Post(const DoorbellCall& call) {
  memory_.call = call;
  memory_.rung.Ring(++rung_);
}

void Doorbell::Abandon() {
  // The daemon may be reading the call. Only its kind changes, so the daemon reads either the old
  // call or kEnd.
  std::atomic_ref<DoorbellCallKind>(memory_.call.kind).store(DoorbellCallKind::kEnd);
  memory_.rung.Ring(++rung_);
  abandoned_ = true;
}

absl::Status Doorbell::Ring(const DoorbellCall& call) {
  // Waits for a call that Post() rang.
  if (rung_ != 0) {
    RETURN_IF_ERROR(Await(BellWaiter::Clock::time_point::max()).status());
  }
  Post(call);
  return absl::OkStatus();
}

absl::StatusOr<DoorbellAnswer> Doorbell::Call(const DoorbellCall& call) {
  RETURN_IF_ERROR(Ring(call));
  ASSIGN_OR_RETURN(const std::optional<DoorbellAnswer> answer,
                   Answer(BellWaiter::Clock::time_point::max()));
  return *answer;
}

absl::StatusOr<std::string> Doorbell::CallForAll(DoorbellCall call) {
  std::string all;
  for (;;) {
    call.offset = static_cast<int64_t>(all.size());
    ASSIGN_OR_RETURN(const DoorbellAnswer answer, Call(call));
    all.append(reinterpret_cast<const char*>(data_.data()), static_cast<size_t>(answer.byte_count));
    if (answer.left <= 0 || answer.byte_count == 0) return all;
  }
}

DoorbellCall AttendCall(DoorbellCallKind kind, int layer, const StepTensors& tensors) {
  DoorbellCall call = {};
  call.kind = kind;
  call.layer = layer;
  call.q_dtype = static_cast<uint32_t>(ToProto(tensors.q_dtype));
  call.out_dtype = static_cast<uint32_t>(ToProto(tensors.out_dtype));
  call.wants_lse = tensors.lse != nullptr ? 1 : 0;
  return call;
}

absl::StatusOr<std::optional<DoorbellAnswer>> Doorbell::Answer(
    BellWaiter::Clock::time_point deadline) {
  ASSIGN_OR_RETURN(const bool answered, Await(deadline));
  if (!answered) return std::nullopt;
  const DoorbellAnswer answer = memory_.answer;
  if (answer.byte_count < 0 || answer.byte_count > static_cast<int64_t>(data_.size()) ||
      answer.text_bytes > sizeof(memory_.text)) {
    broken_ = true;
    return NoSense();
  }
  if (answer.code == 0) return answer;
  const std::string details(reinterpret_cast<const char*>(memory_.text), answer.text_bytes);
  google::rpc::Status told;
  absl::Status status(static_cast<absl::StatusCode>(answer.code),
                      told.ParseFromString(details) ? told.message() : "");
  status.SetPayload(kDetails, absl::Cord(details));
  return status;
}

absl::StatusOr<std::shared_ptr<SessionSocket>> DaemonSession::Connected(Need need) {
  if (socket_ != nullptr && socket_->alive()) return socket_;
  descriptor_ = -1;
  socket_.reset();
  idle_.clear();
  const auto lacking = [need](const absl::Status& why) {
    if (need == Need::kRegion) {
      return absl::Status(why.code(), absl::StrCat("no regions: ", why.message()));
    }
    // Steps have messages in place of a doorbell.
    return absl::UnimplementedError(absl::StrCat("no doorbell: ", why.message()));
  };
  const auto nothing = [&](const char* why) { return lacking(absl::UnimplementedError(why)); };
  if (!target_.starts_with(kUnix)) return nothing("it needs a unix socket of the daemon");
  if (shares_nothing_) return nothing("the daemon shares no memory");
  const bool known = !path_.empty();
  if (!known) {
    v1::GetServerInfoResponse info;
    const auto stub = v1::AdminService::NewStub(channel_);
    RETURN_IF_ERROR(Called<v1::AdminService::Stub>(*stub, &v1::AdminService::Stub::GetServerInfo,
                                                   v1::GetServerInfoRequest(), info, false,
                                                   client_id_));
    shares_nothing_ = info.region_socket().empty();
    if (shares_nothing_) return nothing("the daemon shares no memory");
    // Uses the client's path of the folder: the daemon may know the folder by another path.
    const std::string path = target_.substr(kUnix.size());
    const size_t folder = path.rfind('/');
    path_ = absl::StrCat(folder == std::string::npos ? "" : path.substr(0, folder + 1),
                         info.region_socket());
  }
  absl::StatusOr<std::shared_ptr<SessionSocket>> socket = SessionSocket::Connect(path_);
  if (socket.ok()) {
    socket_ = *std::move(socket);
    descriptor_ = socket_->descriptor();
    return socket_;
  }
  // The socket existed before, so the daemon has stopped.
  if (known) return absl::UnavailableError(absl::StrCat("no daemon at ", target_));
  path_.clear();
  return lacking(socket.status());
}

absl::StatusOr<Descriptor> DaemonSession::Receive(const v1::Region& region) {
  absl::StatusOr<Descriptor> descriptor = socket_->Receive(region.name());
  if (descriptor.ok() || absl::IsNotFound(descriptor.status())) return descriptor;
  retired_descriptor_ = descriptor_.exchange(-1);
  retired_ = std::move(socket_);
  idle_.clear();
  return descriptor;
}

void DaemonSession::LeaveToParent() {
  for (std::atomic<int>* const descriptor : {&descriptor_, &retired_descriptor_}) {
    if (const int open = descriptor->exchange(-1); open >= 0) close(open);
  }
}

absl::StatusOr<std::string> DaemonSession::Name() {
  const MutexLock lock(mutex_);
  ASSIGN_OR_RETURN(const std::shared_ptr<SessionSocket> socket, Connected(Need::kRegion));
  return socket->session();
}

absl::StatusOr<std::unique_ptr<MappedRegion>> DaemonSession::Map(
    const v1::AttachRegionResponse& response) {
  if (!response.region().device().empty()) return MappedRegion::OfGpu(response);
  const MutexLock lock(mutex_);
  RETURN_IF_ERROR(Connected(Need::kRegion).status());
  ASSIGN_OR_RETURN(const Descriptor descriptor, Receive(response.region()));
  return MappedRegion::OfHost(response.region(), descriptor);
}

absl::StatusOr<std::unique_ptr<Doorbell>> DaemonSession::Take(int64_t data_bytes) {
  const MutexLock lock(mutex_);
  ASSIGN_OR_RETURN(std::shared_ptr<SessionSocket> socket, Connected(Need::kDoorbell));
  for (auto idle = idle_.begin(); idle != idle_.end(); ++idle) {
    if (static_cast<int64_t>((*idle)->data().size()) < data_bytes || (*idle)->busy()) continue;
    std::unique_ptr<Doorbell> taken = std::move(*idle);
    idle_.erase(idle);
    return taken;
  }
  v1::AttachDoorbellRequest request;
  request.set_session(socket->session());
  request.set_byte_count(data_bytes);
  v1::AttachDoorbellResponse response;
  const auto stub = v1::MemoryService::NewStub(channel_);
  const auto attach = [&] {
    return Called<v1::MemoryService::Stub>(*stub, &v1::MemoryService::Stub::AttachDoorbell, request,
                                           response, true, client_id_);
  };
  absl::Status status = attach();
  if (absl::IsNotFound(status) && !socket->alive()) {
    // The daemon has just ended the session, because no call had named it.
    ASSIGN_OR_RETURN(socket, Connected(Need::kDoorbell));
    request.set_session(socket->session());
    status = attach();
  }
  RETURN_IF_ERROR(status);
  const v1::Region& region = response.region();
  const absl::StatusOr<Descriptor> descriptor = Receive(region);
  if (!descriptor.ok()) return absl::UnavailableError(descriptor.status().message());
  return Doorbell::Map(std::move(socket), region, *descriptor);
}

void DaemonSession::Give(std::unique_ptr<Doorbell> doorbell) {
  {
    const MutexLock lock(mutex_);
    if (doorbell->socket() != socket_) return;
    if (!doorbell->broken() && idle_.size() < kIdleMax) {
      idle_.push_back(std::move(doorbell));
      return;
    }
    // If the list is full, replaces a busy doorbell with this idle one.
    const auto busy =
        std::find_if(idle_.begin(), idle_.end(), [](const auto& idle) { return idle->busy(); });
    if (!doorbell->broken() && busy != idle_.end()) std::swap(doorbell, *busy);
  }
  Detach(std::move(doorbell));
}

void DaemonSession::Detach(std::unique_ptr<Doorbell> doorbell) {
  v1::DetachRegionRequest request;
  request.set_session(doorbell->socket()->session());
  request.set_name(doorbell->name());
  // Before the call, because the memory is charged as long as it is mapped here.
  doorbell.reset();
  v1::DetachRegionResponse response;
  const auto stub = v1::MemoryService::NewStub(channel_);
  // If this fails, the end of the session detaches the region.
  Called<v1::MemoryService::Stub>(*stub, &v1::MemoryService::Stub::DetachRegion, request, response,
                                  false, client_id_)
      .IgnoreError();
}

}  // namespace spillway

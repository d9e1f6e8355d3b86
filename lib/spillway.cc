#include "spillway.h"

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "grpcpp/channel.h"
#include "host/base/status_macros.h"
#include "lib/call.h"
#include "lib/daemon_session.h"
#include "lib/interface.h"
#include "lib/region.h"
#include "services/convert/trace.h"
#include "services/embedded.h"
#include "spillway/access.h"
#include "spillway/presence.h"
#include "spillway/v1/memory_service.pb.h"

struct spillway_region {
  std::unique_ptr<spillway::MappedRegion> mapped;
};

namespace {

absl::Status NoRegions() {
  return absl::UnimplementedError("an embedded engine reads memory of its process without regions");
}

}  // namespace

int spillway_interface() { return SPILLWAY_INTERFACE; }

spillway_channel* spillway_channel_open(const char* target, const spillway_access* access) {
  return spillway::OrNull<spillway_channel>([&]() -> absl::StatusOr<spillway_channel*> {
    const spillway_access given = access == nullptr ? spillway_access{} : *access;
    const auto text = [](const char* of) { return of == nullptr ? "" : of; };
    ASSIGN_OR_RETURN(std::shared_ptr<grpc::Channel> channel,
                     spillway::OpenChannel(target, {text(given.tls_ca), text(given.tls_certificate),
                                                    text(given.tls_key), text(given.token)}));
    auto presence = std::make_shared<spillway::PresenceKeeper>(channel);
    const std::string id = presence->client_id();
    return new spillway_channel{nullptr, channel, id,
                                std::make_shared<spillway::DaemonSession>(target, channel, id),
                                std::move(presence)};
  });
}

spillway_channel* spillway_channel_embed(const char* const* settings, size_t setting_count) {
  return spillway::OrNull<spillway_channel>([&]() -> absl::StatusOr<spillway_channel*> {
    std::vector<std::pair<std::string, std::string>> named;
    for (size_t i = 0; i < setting_count; ++i) {
      named.push_back(absl::StrSplit(settings[i], absl::MaxSplits('=', 1)));
    }
    ASSIGN_OR_RETURN(std::shared_ptr<spillway::Embedded> embedded, spillway::Embedded::Open(named));
    return new spillway_channel{embedded, embedded->channel(), "", nullptr, nullptr};
  });
}

void spillway_channel_close(spillway_channel* channel) { delete channel; }

spillway_call* spillway_call_open(spillway_channel* channel, const char* method,
                                  double timeout_seconds, const char* trace_id, int options) {
  return spillway::OrNull<spillway_call>([&]() -> absl::StatusOr<spillway_call*> {
    const std::string trace = trace_id == nullptr ? "" : trace_id;
    RETURN_IF_ERROR(spillway::CheckTraceId(trace));
    const bool named = (options & SPILLWAY_WITHOUT_CLIENT) == 0;
    return new spillway_call(channel->channel, method, timeout_seconds,
                             named ? channel->client_id : "", trace, channel->WhenUnavailable());
  });
}

int spillway_call_send(spillway_call* call, const void* message, size_t size,
                       double timeout_seconds) {
  return call->Send(message, size, timeout_seconds);
}

void spillway_call_send_end(spillway_call* call) { call->SendEnd(); }

int spillway_call_receive(spillway_call* call, double timeout_seconds, const void** message,
                          size_t* size) {
  return call->Receive(timeout_seconds, message, size);
}

int spillway_call_status(spillway_call* call, const char** message, const void** details,
                         size_t* details_size) {
  *message = call->message().c_str();
  *details = call->details().data();
  *details_size = call->details().size();
  return call->status().error_code();
}

void spillway_call_cancel(spillway_call* call) { call->Cancel(); }

void spillway_call_close(spillway_call* call) {
  if (call != nullptr) spillway::CallEnder()(call);
}

int spillway_session(spillway_channel* channel, char* session, size_t size) {
  return spillway::CodeOf(spillway::Caught([&]() -> absl::Status {
    if (channel->session == nullptr) return NoRegions();
    ASSIGN_OR_RETURN(const std::string name, channel->session->Name());
    if (name.size() >= size) {
      return absl::InvalidArgumentError(absl::StrCat("size: ", size, " bytes are too few for ",
                                                     name.size(), " characters and a 0"));
    }
    std::memcpy(session, name.c_str(), name.size() + 1);
    return absl::OkStatus();
  }));
}

void spillway_session_leave(spillway_channel* channel) {
  if (channel->session != nullptr) channel->session->LeaveToParent();
}

spillway_region* spillway_region_map(spillway_channel* channel, const void* response, size_t size,
                                     spillway_region_place* place) {
  return spillway::OrNull<spillway_region>([&]() -> absl::StatusOr<spillway_region*> {
    if (channel->session == nullptr) return NoRegions();
    spillway::v1::AttachRegionResponse made;
    if (!made.ParseFromArray(response, static_cast<int>(size)) || made.region().name().empty() ||
        made.region().byte_count() <= 0) {
      return absl::InvalidArgumentError("response: this is no AttachRegionResponse");
    }
    ASSIGN_OR_RETURN(std::unique_ptr<spillway::MappedRegion> mapped, channel->session->Map(made));
    *place = {mapped->name().c_str(), mapped->address(), mapped->byte_count(), mapped->ordinal()};
    return new spillway_region{std::move(mapped)};
  });
}

int spillway_region_leave(spillway_region* region, int64_t kept_bytes) {
  return spillway::CodeOf(region->mapped->Leave(kept_bytes));
}

void spillway_region_free(spillway_region* region) { delete region; }

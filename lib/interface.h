// What the functions of spillway.h share: channels, errors, and the conversion of tensors.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/channel.h"
#include "host/device/step_tensors.h"
#include "lib/daemon_session.h"
#include "services/embedded.h"
#include "spillway.h"
#include "spillway/presence.h"

struct spillway_channel {
  // Declared first, so that it is destroyed last.
  std::shared_ptr<spillway::Embedded> embedded;  // null for a daemon
  std::shared_ptr<grpc::Channel> channel;
  std::string client_id;                             // empty: embedded
  std::shared_ptr<spillway::DaemonSession> session;  // null: embedded
  // Null: embedded.
  std::shared_ptr<spillway::PresenceKeeper> presence;

  // What a call does that finds no daemon. It may outlive the channel.
  std::function<void()> WhenUnavailable() const {
    return [presence = std::weak_ptr(presence)] {
      if (const auto keeper = presence.lock()) keeper->Reconnect();
    };
  }
};

namespace spillway {

// Stores an error of this thread and its serialised google.rpc.Status, if it has one, for
// spillway_error. Returns the error's code.
int SetError(const absl::Status& status, std::string details);
// The same, with the details from `engine`, or from a daemon if `engine` is null. trace: the trace
// id of the request, for an engine's log.
int SetError(const absl::Status& status, const Embedded* engine = nullptr,
             std::string_view trace = {});
// Returns 0, or stores an error and returns its code.
int CodeOf(const absl::Status& status);

// Returns the status, with or without a value, that f returns. Turns an exception into a status.
template <typename F>
auto Caught(F f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("out of memory");
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  }
}

// Returns what f makes. If f fails, stores the error and returns nullptr. trace: set by f.
template <typename T, typename F>
T* OrNull(F f, const Embedded* engine = nullptr, const std::string& trace = {}) {
  const absl::StatusOr<T*> made = Caught([&]() -> absl::StatusOr<T*> { return f(); });
  if (made.ok()) return *made;
  SetError(made.status(), engine, trace);
  return nullptr;
}

// INVALID_ARGUMENT for unknown element types and for pointers that are NULL.
absl::StatusOr<StepTensors> TensorsOf(const spillway_step_tensors& from);

}  // namespace spillway

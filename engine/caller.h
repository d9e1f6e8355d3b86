#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/errors.h"
#include "engine/presence.h"

namespace spillway {

// In the engine, an id is the client's id behind the namespace of the client's token,
// "namespace/id", or just "id" if the daemon asks for no tokens. Clients cannot put a slash into an
// id.
inline std::string_view NamespaceOf(std::string_view id) {
  const size_t slash = id.find('/');
  return slash == std::string_view::npos ? std::string_view() : id.substr(0, slash);
}
// The id as the client writes it.
inline std::string_view ClientIdOf(std::string_view id) { return id.substr(id.find('/') + 1); }

// What a token grants its holder while the token is valid. Thread-safe.
struct Grant {
  Grant(std::string token_name, std::string name_space)
      : token_name(std::move(token_name)), name_space(std::move(name_space)) {}
  const std::string token_name;
  const std::string name_space;
  std::atomic<bool> revoked{false};
};

// Who sent a request.
class Caller {
 public:
  // Any client of a daemon that asks for no tokens.
  Caller() = default;
  explicit Caller(std::shared_ptr<const Grant> grant) : grant_(std::move(grant)) {}
  // The same caller, as this client.
  Caller With(std::shared_ptr<Presence> client) const {
    Caller caller = *this;
    caller.client_ = std::move(client);
    return caller;
  }

  // The same caller, in a call with this trace id.
  Caller InTrace(std::string trace) const {
    Caller caller = *this;
    caller.trace_ = std::move(trace);
    return caller;
  }

  // Empty if the daemon asks for no tokens.
  std::string_view name_space() const {
    return grant_ == nullptr ? std::string_view() : grant_->name_space;
  }
  // Whether the daemon has other tenants, about whom this caller must learn nothing.
  bool is_tenant() const { return grant_ != nullptr; }
  // Null if the client sends no id.
  const std::shared_ptr<Presence>& client() const { return client_; }
  // The call's trace id, for the log; empty: none.
  const std::string& trace() const { return trace_; }
  // The engine's id for an id of the caller.
  std::string IdOf(std::string_view id) const {
    return grant_ == nullptr ? std::string(id)
                             : absl::StrCat(grant_->name_space, "/", std::string(id));
  }
  // UNAUTHENTICATED, reason TOKEN_REVOKED, if the token is no longer valid.
  absl::Status Check() const {
    if (grant_ == nullptr || !grant_->revoked) return absl::OkStatus();
    return WithReason(absl::UnauthenticatedError("the token is no longer in the daemon's file"),
                      Reason::kTokenRevoked);
  }

 private:
  std::shared_ptr<const Grant> grant_;
  std::shared_ptr<Presence> client_;
  std::string trace_;
};

}  // namespace spillway

#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "daemon/engine/errors.h"
#include "daemon/engine/presence.h"

namespace spillway {

// The engine's ids are what clients write, behind the namespace that their token gives them:
// "namespace/id", or "id" where no tokens are asked for. No client can write a slash into an id.
inline std::string_view NamespaceOf(std::string_view id) {
  const size_t slash = id.find('/');
  return slash == std::string_view::npos ? std::string_view() : id.substr(0, slash);
}
// As its client writes it.
inline std::string_view ClientIdOf(std::string_view id) { return id.substr(id.find('/') + 1); }

// What a token gives who has it, for as long as the token is good. Thread-safe.
struct Grant {
  Grant(std::string token_name, std::string name_space)
      : token_name(std::move(token_name)), name_space(std::move(name_space)) {}
  const std::string token_name;
  const std::string name_space;
  std::atomic<bool> revoked{false};
};

// Whose a request is.
class Caller {
 public:
  // Anybody's, of a daemon that asks for no tokens.
  Caller() = default;
  explicit Caller(std::shared_ptr<const Grant> grant) : grant_(std::move(grant)) {}
  // The same of a client that says who it is.
  Caller With(std::shared_ptr<Presence> client) const {
    Caller caller = *this;
    caller.client_ = std::move(client);
    return caller;
  }

  // The same in a call that its client's tracing knows by that.
  Caller InTrace(std::string trace) const {
    Caller caller = *this;
    caller.trace_ = std::move(trace);
    return caller;
  }

  // Empty where no tokens are asked for.
  std::string_view name_space() const {
    return grant_ == nullptr ? std::string_view() : grant_->name_space;
  }
  // Whether others than this one are served too, of whom it shall learn nothing.
  bool is_tenant() const { return grant_ != nullptr; }
  // Null where it does not say.
  const std::shared_ptr<Presence>& client() const { return client_; }
  // By what its client's tracing knows the call, for the log; empty where it does not say.
  const std::string& trace() const { return trace_; }
  // The engine's id of what the caller calls so.
  std::string IdOf(std::string_view id) const {
    return grant_ == nullptr ? std::string(id)
                             : absl::StrCat(grant_->name_space, "/", std::string(id));
  }
  // UNAUTHENTICATED, reason TOKEN_REVOKED, once the token is good no more.
  absl::Status Check() const {
    if (grant_ == nullptr || !grant_->revoked) return absl::OkStatus();
    return WithReason(absl::UnauthenticatedError("the token is no longer in the daemon's file"),
                      "TOKEN_REVOKED");
  }

 private:
  std::shared_ptr<const Grant> grant_;
  std::shared_ptr<Presence> client_;
  std::string trace_;
};

}  // namespace spillway

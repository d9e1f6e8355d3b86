#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "engine/caller.h"

namespace spillway {

// Knows who may call. Thread-safe.
class Authenticator {
 public:
  virtual ~Authenticator() = default;

  // The caller, from the value "Bearer TOKEN" of the header "authorization". UNAUTHENTICATED,
  // reason TOKEN_MISSING or TOKEN_UNKNOWN.
  virtual absl::StatusOr<Caller> Authenticate(std::string_view authorization) const = 0;
};

}  // namespace spillway

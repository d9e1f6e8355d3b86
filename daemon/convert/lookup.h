#pragma once

#include <memory>
#include <string>

#include "daemon/convert/names.h"
#include "daemon/engine/caller.h"
#include "daemon/engine/engine.h"

namespace spillway {

// What a caller calls so. INVALID_ARGUMENT for what is no name, NOT_FOUND for a name of nothing,
// or of another's; UNAUTHENTICATED once the caller's token is good no more.
inline absl::StatusOr<std::shared_ptr<Model>> FindModel(const Engine& engine, const Caller& caller,
                                                        const std::string& name,
                                                        const std::string& field) {
  if (absl::Status status = caller.Check(); !status.ok()) return status;
  const absl::StatusOr<std::string> id = ParseName(name, "models", field);
  if (!id.ok()) return id.status();
  return engine.registry().FindModel(caller.IdOf(*id));
}

inline absl::StatusOr<std::shared_ptr<Sequence>> FindSequence(const Engine& engine,
                                                              const Caller& caller,
                                                              const std::string& name,
                                                              const std::string& field) {
  if (absl::Status status = caller.Check(); !status.ok()) return status;
  const absl::StatusOr<std::string> id = ParseName(name, "sequences", field);
  if (!id.ok()) return id.status();
  return engine.registry().UseSequence(caller.IdOf(*id), caller.client());
}

// Of a sequence that a caller makes. id: the one that it asks for; empty: the daemon chooses.
inline Origin OriginOf(const Caller& caller, const std::string& id) {
  return {!id.empty(), caller.client(), caller.trace()};
}

}  // namespace spillway

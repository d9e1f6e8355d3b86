#pragma once

#include <memory>
#include <string>

#include "engine/caller.h"
#include "engine/engine.h"
#include "services/convert/names.h"

namespace spillway {

// Finds what has this name for the caller. INVALID_ARGUMENT if it is no valid name; NOT_FOUND if
// nothing in the caller's namespace has the name; UNAUTHENTICATED if the caller's token is no
// longer valid.
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

// The origin of a sequence that the caller creates. id: the one that it asks for; empty: the daemon
// chooses.
inline Origin OriginOf(const Caller& caller, const std::string& id) {
  return {!id.empty(), caller.client(), caller.trace()};
}

}  // namespace spillway

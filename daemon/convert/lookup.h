#pragma once

#include <memory>
#include <string>

#include "daemon/convert/names.h"
#include "daemon/engine/engine.h"

namespace spillway {

// INVALID_ARGUMENT for what is no name, NOT_FOUND for a name of nothing.
inline absl::StatusOr<std::shared_ptr<Model>> FindModel(const Engine& engine,
                                                        const std::string& name,
                                                        const std::string& field) {
  const absl::StatusOr<std::string> id = ParseName(name, "models", field);
  if (!id.ok()) return id.status();
  return engine.registry().FindModel(*id);
}

inline absl::StatusOr<std::shared_ptr<Sequence>> FindSequence(const Engine& engine,
                                                              const std::string& name,
                                                              const std::string& field) {
  const absl::StatusOr<std::string> id = ParseName(name, "sequences", field);
  if (!id.ok()) return id.status();
  return engine.registry().FindSequence(*id);
}

}  // namespace spillway

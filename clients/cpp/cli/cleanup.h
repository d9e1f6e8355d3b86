// A model and a sequence that are deleted with their owner.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "spillway/client.h"

namespace spillway::cli {

// Deletes the model and the sequence that it owns, with the client's default timeout, even if the
// command was interrupted. Not thread-safe.
class TemporaryResources {
 public:
  explicit TemporaryResources(Client& client) : client_(client) {}
  // Deletes what was not deleted yet. Prints an error to the standard error stream.
  ~TemporaryResources();

  TemporaryResources(const TemporaryResources&) = delete;
  TemporaryResources& operator=(const TemporaryResources&) = delete;

  void OwnModel(std::string name) { model_ = std::move(name); }
  void OwnSequence(std::string name) { sequence_ = std::move(name); }

  // Deletes now. Returns the first error.
  absl::Status Delete();

 private:
  Client& client_;
  std::string model_;
  std::string sequence_;
};

}  // namespace spillway::cli

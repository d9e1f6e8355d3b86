// A model and a sequence that go when their owner does.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "spillway/client.h"

namespace spillway::cli {

// Deletes what it was given, with the daemon's usual deadline and whatever
// stopped the work itself. Not thread-safe.
class TemporaryResources {
 public:
  explicit TemporaryResources(Client& client) : client_(client) {}
  // Deletes what is left and prints a failure to the standard error stream.
  ~TemporaryResources();

  TemporaryResources(const TemporaryResources&) = delete;
  TemporaryResources& operator=(const TemporaryResources&) = delete;

  void OwnModel(std::string name) { model_ = std::move(name); }
  void OwnSequence(std::string name) { sequence_ = std::move(name); }

  // Deletes now; the first failure is returned.
  absl::Status Delete();

 private:
  Client& client_;
  std::string model_;
  std::string sequence_;
};

}  // namespace spillway::cli

#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "host/model/model_spec.h"
#include "host/policy/policy.h"

namespace spillway {

// What a process that opens a store needs to make a model, or a sequence, anew.
struct StoredModel {
  std::string id;
  ModelSpec spec;
  Policy policy;
  absl::Time create_time;
};
struct StoredSequence {
  std::string id;
  std::string model_id;
  Policy policy;
  absl::Duration ttl;  // may be infinite
  absl::Time create_time;
  bool named = true;   // whether a client chose the id
  std::string client;  // the engine's id of who made it; may be empty
};

// JSON, which another version of the program reads as well: members by name, enums too.
std::string Describe(const StoredModel& model);
std::string Describe(const StoredSequence& sequence);

// DATA_LOSS for what Describe() did not write, and for a spec that this build does not serve.
absl::StatusOr<StoredModel> ParseStoredModel(std::string_view json);
// The policy is checked against the model's spec by the caller.
absl::StatusOr<StoredSequence> ParseStoredSequence(std::string_view json);

}  // namespace spillway

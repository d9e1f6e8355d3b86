#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "host/model/model_spec.h"
#include "host/policy/policy.h"

namespace spillway {

// What a process that opens a store needs to create a model or a sequence again.
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
  std::string client;  // the engine's id of the client that created it; may be empty
};

// JSON that other versions of the program can read too: members and enum values are stored by name.
std::string Describe(const StoredModel& model);
std::string Describe(const StoredSequence& sequence);

// DATA_LOSS for a text that Describe() did not write, and for a spec or policy that this build does
// not support.
absl::StatusOr<StoredModel> ParseStoredModel(std::string_view json);
// DATA_LOSS as above. The caller must check the policy against the model's spec.
absl::StatusOr<StoredSequence> ParseStoredSequence(std::string_view json);

}  // namespace spillway

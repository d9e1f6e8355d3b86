#pragma once

#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "google/protobuf/timestamp.pb.h"
#include "spillway/v1/admin_service.pb.h"
#include "spillway/v1/model_service.pb.h"
#include "spillway/v1/sequence_service.pb.h"

namespace spillway {

google::protobuf::Timestamp ToProto(absl::Time time);

struct ModelDescription {
  ModelSpec spec;  // normalised
  Policy policy;   // valid for it
};
// INVALID_ARGUMENT names every field that is out of range or excluded.
absl::StatusOr<ModelDescription> FromProto(const v1::Model& model);
v1::Model ToProto(const Model& model, const Engine& engine);

// The ttl of a sequence to create: `unset` when the message has none, infinite
// for 0. INVALID_ARGUMENT names the field.
absl::StatusOr<absl::Duration> TtlFromProto(const v1::Sequence& sequence, absl::Duration unset);
v1::Sequence ToProto(const Sequence& sequence);

void ToProto(const WorkCounters& counters, v1::WorkStatistics& work);
void ToProto(const HeadAudit& head, v1::HeadAudit& out);

}  // namespace spillway

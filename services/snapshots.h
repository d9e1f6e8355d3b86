#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/snapshot/manifest.h"
#include "host/device/cancel.h"
#include "services/context.h"
#include "spillway/v1/sequence_service.pb.h"

namespace spillway {

// The calls about snapshots. They run in the calling thread, which waits for files and for the
// turn of the sequence. Errors as the API says. Thread-safe.
absl::Status SaveSequence(const ServiceContext& services, const Caller& caller,
                          const v1::SaveSequenceRequest& request,
                          const std::shared_ptr<CancelToken>& cancel,
                          v1::SaveSequenceResponse& response);
absl::Status LoadSequence(const ServiceContext& services, const Caller& caller,
                          const v1::LoadSequenceRequest& request,
                          const std::shared_ptr<CancelToken>& cancel,
                          v1::LoadSequenceResponse& response);
absl::Status DeleteSnapshot(const ServiceContext& services, const Caller& caller,
                            const v1::DeleteSnapshotRequest& request);

}  // namespace spillway

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/engine/requests.h"
#include "daemon/snapshot/folder.h"
#include "daemon/snapshot/manifest.h"
#include "host/device/cancel.h"
#include "host/memory/memory_budget.h"

namespace spillway {

// The folder's manifest. NOT_FOUND, reason SNAPSHOT_NOT_FOUND, without one; else as
// ParseManifest. Charges `budget` what parsing takes, while it does.
absl::StatusOr<Manifest> ReadManifest(const SnapshotFolder& folder, MemoryBudget& budget);

// What the client gave, or nothing. DATA_LOSS, naming the file, where it is not what the manifest
// says.
absl::StatusOr<std::string> ReadClientData(const SnapshotFolder& folder, const Manifest& manifest);

// Reads the rows, in order of tokens, and has `append` take them: chunks of all tokens of a
// file, of consecutive layers, with generation 0, whose bytes stay until it returns. Every
// file's size, header, digest and numbers are checked, the digest at last after its last chunk
// was read and before that is appended; DATA_LOSS names the file that is wrong or missing.
// What was appended before is then the caller's to delete. Errors of `append` are returned as they
// are. Asks `cancel` before every chunk.
// REQUIRES: CheckFits(manifest, spec).
absl::Status ReadRows(const SnapshotFolder& folder, const ModelSpec& spec, const Manifest& manifest,
                      MemoryBudget& budget, const CancelToken& cancel,
                      absl::FunctionRef<absl::Status(const Chunk&)> append);

}  // namespace spillway

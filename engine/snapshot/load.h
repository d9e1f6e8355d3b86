#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/requests.h"
#include "engine/snapshot/folder.h"
#include "engine/snapshot/manifest.h"
#include "host/device/cancel.h"
#include "host/memory/memory_budget.h"

namespace spillway {

// The manifest of the folder. NOT_FOUND, reason SNAPSHOT_NOT_FOUND, if there is none; other errors
// as ParseManifest. The memory for parsing is charged to `budget` during the call.
absl::StatusOr<Manifest> ReadManifest(const SnapshotFolder& folder, MemoryBudget& budget);

// The client data, or an empty text if there are none. DATA_LOSS names the file if it does not
// match the manifest.
absl::StatusOr<std::string> ReadClientData(const SnapshotFolder& folder, const Manifest& manifest);

// Reads the rows in the order of tokens, and passes them to `append` in chunks: all tokens of a
// file, consecutive layers, generation 0. Their bytes stay valid until `append` returns. The size,
// header, digest and values of every file are checked, the digest after the last chunk of the file
// was read and before it is appended. Chunks that were appended before an error are the caller's to
// delete. DATA_LOSS names the file that is wrong or missing. Errors of `append` are returned
// unchanged. Checks `cancel` before every chunk.
// REQUIRES: CheckFits(manifest, spec) is OK.
absl::Status ReadRows(const SnapshotFolder& folder, const ModelSpec& spec, const Manifest& manifest,
                      MemoryBudget& budget, const CancelToken& cancel,
                      absl::FunctionRef<absl::Status(const Chunk&)> append);

}  // namespace spillway

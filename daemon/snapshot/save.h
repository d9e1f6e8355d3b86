#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/snapshot/folder.h"
#include "daemon/snapshot/manifest.h"
#include "host/device/cancel.h"
#include "host/memory/layer_rows.h"
#include "host/memory/memory_budget.h"

namespace spillway {

struct SavedSnapshot {
  int64_t byte_count = 0;          // of all its files but the manifest
  int64_t written_byte_count = 0;  // of those that were not there with these bytes
};

// Saves the first token_count tokens of all layers and makes the manifest, whose files,
// tokens_per_file and client_data are filled in here, the folder's last: until then what was
// there before is what loads, and afterwards this. Files that are there with the very bytes,
// of an earlier snapshot or of a save that was cut off, are kept; what is no file of this
// snapshot is removed at the end if it is named like one. Another program's manifest.json is
// refused: FAILED_PRECONDITION, reason NOT_A_SNAPSHOT. Buffers of 9 MiB or so are charged as
// messages. Stops with `cancel` (CANCELLED, DEADLINE_EXCEEDED), which it asks for every layer of
// every file.
// REQUIRES: each layer has token_count tokens at least; client_data of kClientDataBytesMax at
// most.
absl::StatusOr<SavedSnapshot> SaveSnapshot(SnapshotFolder& folder, const ModelSpec& spec,
                                           std::span<const LayerRows> rows, Manifest manifest,
                                           std::span<const std::byte> client_data,
                                           MemoryBudget& budget, const CancelToken& cancel);

}  // namespace spillway

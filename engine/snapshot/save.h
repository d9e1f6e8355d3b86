#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/snapshot/folder.h"
#include "engine/snapshot/manifest.h"
#include "host/device/cancel.h"
#include "host/memory/layer_rows.h"
#include "host/memory/memory_budget.h"

namespace spillway {

struct SavedSnapshot {
  int64_t byte_count = 0;          // of all files except the manifest
  int64_t written_byte_count = 0;  // of the files that did not exist already with the same bytes
};

// Saves the first manifest.token_count tokens of all layers. Fills in files, tokens_per_file and
// client_data of the manifest, and writes the manifest last: until then, a load gets the previous
// snapshot, and after that the new one. Files with the same bytes, of an earlier snapshot or of an
// interrupted save, are kept. At the end, other files that are named like files of a snapshot are
// removed. FAILED_PRECONDITION, reason NOT_A_SNAPSHOT, if manifest.json belongs to another program.
// Buffers of about 9 MiB are charged as messages. Checks `cancel` for every layer of every file
// (CANCELLED, DEADLINE_EXCEEDED).
// REQUIRES: each layer has at least token_count tokens; client_data has at most kClientDataBytesMax
// bytes.
absl::StatusOr<SavedSnapshot> SaveSnapshot(SnapshotFolder& folder, const ModelSpec& spec,
                                           std::span<const LayerRows> rows, Manifest manifest,
                                           std::span<const std::byte> client_data,
                                           MemoryBudget& budget, const CancelToken& cancel);

}  // namespace spillway

#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "engine/account.h"
#include "engine/snapshot/folder.h"

namespace spillway {

// A snapshot may be replaced or removed, even a damaged one. FAILED_PRECONDITION, reason
// NOT_A_SNAPSHOT, if manifest.json belongs to another program.
absl::Status CheckReplaceable(const SnapshotFolder& folder);

// Removes the files of a snapshot, also those of an interrupted save. Other files stay. Below a
// root other than "/", folders that are empty then are removed too. Errors as
// SnapshotFolder::OpenToRemove and CheckReplaceable(), and NOT_FOUND, reason SNAPSHOT_NOT_FOUND, if
// there is nothing to remove. account: is charged less; may be null.
absl::Status RemoveSnapshot(const std::string& root, const std::string& name,
                            const std::shared_ptr<Account>& account);

}  // namespace spillway

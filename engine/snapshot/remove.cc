#include "engine/snapshot/remove.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/errors.h"
#include "engine/snapshot/layout.h"
#include "engine/snapshot/manifest.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

// Removes the files. Returns whether there were any.
absl::StatusOr<bool> RemoveFiles(const SnapshotFolder& folder) {
  RETURN_IF_ERROR(CheckReplaceable(folder));
  ASSIGN_OR_RETURN(const std::vector<std::string> names, folder.List());
  bool removed = false;
  // The manifest first, so that what is left after a crash is no snapshot.
  for (const std::string& name : names) {
    if (name != kManifestName) continue;
    RETURN_IF_ERROR(folder.Remove(name));
    RETURN_IF_ERROR(folder.Sync());
    removed = true;
  }
  for (const std::string& name : names) {
    if (!IsDataFileName(name) && name != kPartialName) continue;
    RETURN_IF_ERROR(folder.Remove(name));
    removed = true;
  }
  RETURN_IF_ERROR(folder.Sync());
  return removed;
}

}  // namespace

absl::Status CheckReplaceable(const SnapshotFolder& folder) {
  absl::StatusOr<SnapshotFile> file = folder.Open(kManifestName);
  if (absl::IsNotFound(file.status())) return absl::OkStatus();
  constexpr std::string_view kBegin = "{\n  \"format\": \"spillway-snapshot\"";
  std::string begin(kBegin.size(), '\0');
  if (file.ok() && file->byte_count() >= static_cast<int64_t>(begin.size()) &&
      file->Read(std::as_writable_bytes(std::span(begin.data(), begin.size()))).ok() &&
      begin == kBegin) {
    return absl::OkStatus();
  }
  return WithReason(
      absl::FailedPreconditionError(absl::StrCat(
          folder.PathOf(kManifestName), " does not belong to a snapshot: choose another folder")),
      Reason::kNotASnapshot, {{"folder", folder.path()}});
}

absl::Status RemoveSnapshot(const std::string& root, const std::string& name,
                            const std::shared_ptr<Account>& account) {
  ASSIGN_OR_RETURN(SnapshotFolder folder, SnapshotFolder::OpenToRemove(root, name, account));
  ASSIGN_OR_RETURN(const bool removed, RemoveFiles(folder));
  // While the folder is locked: a save that waits for it finds that it is gone.
  if (folder.RemoveIfEmpty(root, name, account) || removed) return absl::OkStatus();
  return SnapshotNotFound(folder.path());
}

}  // namespace spillway

#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "engine/account.h"
#include "host/base/descriptor.h"

namespace spillway {

// What a file or a folder of snapshots counts in a quota: its bytes in whole blocks, so that many
// small files are not free.
inline constexpr int64_t kBlockBytes = 4096;
inline int64_t ChargedBytes(int64_t file_bytes) {
  return (file_bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
}
// The charge of a folder without its entries.
inline constexpr int64_t kFolderBytes = kBlockBytes;

// Charges every namespace whose snapshots are below `root` with all that its folder holds. Called
// once, when the daemon starts.
void ChargeSnapshots(const std::filesystem::path& root, AccountTable& accounts);

// The charge of the files in one folder, while they are written or removed. The destructor charges
// the account with what is there then. REQUIRES: nobody else changes the folder. Not thread-safe.
class FolderCharge {
 public:
  // folder: a descriptor of its own.
  FolderCharge(std::shared_ptr<Account> account, Descriptor folder);
  ~FolderCharge();
  FolderCharge(const FolderCharge&) = delete;
  FolderCharge& operator=(const FolderCharge&) = delete;

  // Charges a file of this size, before it is written. Errors as Account::Charge().
  absl::Status Add(int64_t file_bytes);

 private:
  // Of the regular files that are there now; empty if the folder cannot be read.
  std::optional<int64_t> BytesThere() const;

  const std::shared_ptr<Account> account_;
  const Descriptor folder_;
  int64_t charged_bytes_;
};

}  // namespace spillway

#include "engine/snapshot/folder_charge.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <system_error>
#include <utility>

namespace spillway {
namespace {

namespace fs = std::filesystem;

// Links are not followed, and count nothing.
int64_t BytesOf(const fs::directory_entry& entry) {
  std::error_code failed;
  const fs::file_status status = entry.symlink_status(failed);
  if (fs::is_directory(status)) return kFolderBytes;
  if (!fs::is_regular_file(status)) return 0;
  const uintmax_t size = entry.file_size(failed);
  return failed ? 0 : ChargedBytes(static_cast<int64_t>(size));
}

}  // namespace

void ChargeSnapshots(const fs::path& root, AccountTable& accounts) {
  std::error_code failed;
  for (fs::directory_iterator it(root, failed), end; !failed && it != end; it.increment(failed)) {
    if (!fs::is_directory(it->symlink_status(failed))) continue;
    int64_t bytes = kFolderBytes;
    std::error_code ended;
    for (fs::recursive_directory_iterator below(it->path(), ended), last; !ended && below != last;
         below.increment(ended)) {
      bytes += BytesOf(*below);
    }
    accounts.Of(it->path().filename().string())->Settle(bytes);
  }
}

FolderCharge::FolderCharge(std::shared_ptr<Account> account, Descriptor folder)
    : account_(std::move(account)),
      folder_(std::move(folder)),
      charged_bytes_(BytesThere().value_or(0)) {}

FolderCharge::~FolderCharge() {
  if (const std::optional<int64_t> there = BytesThere()) account_->Settle(*there - charged_bytes_);
}

absl::Status FolderCharge::Add(int64_t file_bytes) {
  const int64_t bytes = ChargedBytes(file_bytes);
  absl::Status status = account_->Charge(bytes);
  if (status.ok()) charged_bytes_ += bytes;
  return status;
}

std::optional<int64_t> FolderCharge::BytesThere() const {
  int64_t bytes = 0;
  // A separate descriptor, because reading moves its position.
  const int fd = openat(folder_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(fd < 0 ? nullptr : fdopendir(fd), closedir);
  if (entries == nullptr) return std::nullopt;
  while (const dirent* entry = readdir(entries.get())) {
    struct stat info {};
    const bool is_there = fstatat(fd, entry->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0;
    if (is_there && S_ISREG(info.st_mode)) bytes += ChargedBytes(info.st_size);
  }
  return bytes;
}

}  // namespace spillway

#pragma once

#include <cstdint>
#include <future>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "host/base/regular_file.h"
#include "host/base/steady_time.h"

namespace spillway {

// A file that is read again while the daemon runs. A network file system may make a read wait for
// ever, so each read has a thread of its own, which may outlive this object. There is at most one
// at a time. Not thread-safe.
class WatchedFile {
 public:
  // How long to wait for a file that is needed now, and for one in the turn of a thread that has
  // other work.
  static constexpr absl::Duration kNeeded = absl::Seconds(5);
  static constexpr absl::Duration kTurn = absl::Milliseconds(100);
  // After this time, a read that does not end is an error.
  static constexpr absl::Duration kSilence = absl::Seconds(2);

  using Reader = absl::StatusOr<RegularFile> (*)(const std::string& path, int64_t bytes_max);

  // At most bytes_max bytes are read. path: may be empty, then it must not be read. reader: for
  // tests.
  WatchedFile(std::string path, int64_t bytes_max, Reader reader = ReadRegularFile)
      : path_(std::move(path)), bytes_max_(bytes_max), reader_(reader) {}
  WatchedFile(WatchedFile&&) = default;

  const std::string& path() const { return path_; }

  // The file as it is now. If the file system does not answer within `wait`, the file as the last
  // read found it, and later calls wait for the same read. Errors as ReadRegularFile();
  // DEADLINE_EXCEEDED if there was no read before, or after kSilence.
  absl::StatusOr<RegularFile> Read(absl::Duration wait);

 private:
  std::string path_;
  int64_t bytes_max_;
  Reader reader_;
  std::future<absl::StatusOr<RegularFile>> reading_;  // valid while a read has not been taken
  SteadyTime began_;
  bool was_read_ = false;
  absl::StatusOr<RegularFile> last_;
};

}  // namespace spillway

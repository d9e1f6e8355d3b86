#include "daemon/config/watched_file.h"

#include <system_error>
#include <thread>

#include "absl/strings/str_cat.h"

namespace spillway {

absl::StatusOr<RegularFile> WatchedFile::Read(absl::Duration wait) {
  if (!reading_.valid()) {
    std::promise<absl::StatusOr<RegularFile>> promise;
    reading_ = promise.get_future();
    began_ = SteadyNow();
    try {
      // It has its own copies, because it may outlive this.
      std::thread([path = path_, bytes_max = bytes_max_, reader = reader_,
                   promise = std::move(promise)]() mutable {
        promise.set_value(reader(path, bytes_max));
      }).detach();
    } catch (const std::system_error& error) {
      reading_ = {};
      return absl::ResourceExhaustedError(
          absl::StrCat(path_, ": there is no thread to read it: ", error.what()));
    }
  }
  if (reading_.wait_for(absl::ToChronoNanoseconds(wait)) == std::future_status::ready) {
    last_ = reading_.get();
    was_read_ = true;
  } else if (!was_read_ || SteadyNow() >= After(began_, kSilence)) {
    last_ = absl::DeadlineExceededError(
        absl::StrCat(path_, ": its file system does not answer, for more than ",
                     absl::FormatDuration(was_read_ ? kSilence : wait)));
  }
  return last_;
}

}  // namespace spillway

#include "engine/account.h"

#include "absl/strings/str_cat.h"
#include "engine/errors.h"

namespace spillway {
namespace {

absl::Status Exhausted(const std::string& name_space, const char* quota, int64_t needed,
                       int64_t used, int64_t most, const char* what, const char* advice) {
  return WithReason(
      absl::ResourceExhaustedError(absl::StrCat(
          "the quota ", quota, " of namespace ", name_space, " is ", most, what, ": ", used,
          " are in use, and ", needed, " more are needed; ", advice, " of this namespace")),
      Reason::kQuotaExhausted,
      {{"quota", quota},
       {"limit", absl::StrCat(most)},
       {"used", absl::StrCat(used)},
       {"needed", absl::StrCat(needed)}});
}

}  // namespace

absl::Status Account::Charge(int64_t bytes) {
  const int64_t most = bytes_max_;
  int64_t used = used_bytes_;
  do {
    if (bytes > 0 && most > 0 && used + bytes > most) {
      return Exhausted(name_space_, "bytes_max", bytes, used, most, " bytes",
                       "delete or truncate sequences, or delete snapshots, models or regions");
    }
  } while (!used_bytes_.compare_exchange_weak(used, used + bytes));
  return absl::OkStatus();
}

absl::Status Account::AddSequence() {
  const int64_t most = sequence_count_max_;
  int64_t count = sequence_count_;
  do {
    if (most > 0 && count >= most) {
      return Exhausted(name_space_, "sequence_count_max", 1, count, most, " sequences",
                       "delete sequences");
    }
  } while (!sequence_count_.compare_exchange_weak(count, count + 1));
  return absl::OkStatus();
}

}  // namespace spillway

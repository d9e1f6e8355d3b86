#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/access/token_file.h"
#include "daemon/config/watched_file.h"
#include "engine/account.h"
#include "engine/caller.h"
#include "host/base/mutex.h"
#include "services/authenticator.h"

namespace spillway {

// The tokens that may use the daemon, from a file that is read again when it changes. Thread-safe,
// except for Reload().
class TokenTable final : public Authenticator {
 public:
  // accounts: receive the quotas in the file; must outlive the table. Errors as
  // WatchedFile::Read and ParseTokens.
  static absl::StatusOr<std::unique_ptr<TokenTable>> Open(const std::string& path,
                                                          AccountTable* accounts);
  TokenTable(const TokenTable&) = delete;
  TokenTable& operator=(const TokenTable&) = delete;

  // Takes the same time for every token.
  absl::StatusOr<Caller> Authenticate(std::string_view authorization) const override
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Reads the file again. True if it has changed and is used from now on. Callers whose tokens it
  // does not contain any more are refused. Errors as Open(), once for each change; then the earlier
  // tokens stay valid.
  absl::StatusOr<bool> Reload() ABSL_LOCKS_EXCLUDED(mutex_);
  size_t size() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Token {
    TokenDigest digest;
    std::shared_ptr<Grant> grant;
  };

  TokenTable(const std::string& path, AccountTable* accounts)
      : file_(path, kTokenFileBytesMax), accounts_(accounts) {}
  absl::Status Take(const RegularFile& file) ABSL_LOCKS_EXCLUDED(mutex_);

  WatchedFile file_;
  AccountTable* const accounts_;
  absl::StatusOr<RegularFile> seen_;  // what was read last
  mutable Mutex mutex_;
  std::vector<Token> tokens_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway

#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/access/token_file.h"
#include "daemon/engine/account.h"
#include "daemon/engine/caller.h"
#include "host/base/mutex.h"

namespace spillway {

// Who may use the daemon: the tokens of a file, which is taken anew when it changes. Thread-safe,
// but for Reload().
class TokenTable {
 public:
  // accounts: get the file's quotas; they outlive the table. INVALID_ARGUMENT as ReadTokenFile and
  // ParseTokens.
  static absl::StatusOr<std::unique_ptr<TokenTable>> Open(const std::string& path,
                                                          AccountTable* accounts);
  TokenTable(const TokenTable&) = delete;
  TokenTable& operator=(const TokenTable&) = delete;

  // Whose a call is by its header "authorization", "Bearer TOKEN". UNAUTHENTICATED, reason
  // TOKEN_MISSING or TOKEN_UNKNOWN. Takes the same time for every token.
  absl::StatusOr<Caller> Authenticate(std::string_view authorization) const
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Reads the file again. Where it has changed what it says counts from then on: true. Callers of
  // tokens that it has no more are refused. Errors as Open, once for each change: what it said
  // before stays.
  absl::StatusOr<bool> Reload() ABSL_LOCKS_EXCLUDED(mutex_);
  size_t size() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Token {
    TokenDigest digest;
    std::shared_ptr<Grant> grant;
  };

  TokenTable(std::string path, AccountTable* accounts)
      : path_(std::move(path)), accounts_(accounts) {}
  absl::Status Take(const std::string& text) ABSL_LOCKS_EXCLUDED(mutex_);

  const std::string path_;
  AccountTable* const accounts_;
  std::string seen_;  // the last text, or why there was none
  mutable Mutex mutex_;
  std::vector<Token> tokens_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway

#include "daemon/access/token_table.h"

#include <openssl/crypto.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "engine/errors.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

constexpr std::string_view kScheme = "Bearer ";

}  // namespace

absl::StatusOr<std::unique_ptr<TokenTable>> TokenTable::Open(const std::string& path,
                                                             AccountTable* accounts) {
  std::unique_ptr<TokenTable> table(new TokenTable(path, accounts));
  table->seen_ = table->file_.Read(WatchedFile::kNeeded);
  RETURN_IF_ERROR(table->seen_.status());
  RETURN_IF_ERROR(table->Take(*table->seen_));
  return table;
}

absl::StatusOr<Caller> TokenTable::Authenticate(std::string_view authorization) const {
  const absl::string_view scheme(authorization.data(),
                                 std::min(authorization.size(), kScheme.size()));
  if (!absl::EqualsIgnoreCase(scheme, absl::string_view(kScheme.data(), kScheme.size()))) {
    return WithReason(
        absl::UnauthenticatedError(
            "this daemon requires a token: send the metadata \"authorization: Bearer TOKEN\""),
        Reason::kTokenMissing);
  }
  const TokenDigest digest = DigestOf(authorization.substr(kScheme.size()));
  std::shared_ptr<const Grant> found;
  {
    const MutexLock lock(mutex_);
    for (const Token& token : tokens_) {
      if (CRYPTO_memcmp(token.digest.data(), digest.data(), digest.size()) == 0) {
        found = token.grant;
      }
    }
  }
  if (found != nullptr) return Caller(std::move(found));
  return WithReason(absl::UnauthenticatedError("this daemon does not know the token"),
                    Reason::kTokenUnknown);
}

absl::Status TokenTable::Take(const RegularFile& file) {
  ASSIGN_OR_RETURN(const std::vector<TokenEntry> entries, ParseTokens(file, file_.path()));
  std::vector<Token> tokens;
  const MutexLock lock(mutex_);
  for (const TokenEntry& entry : entries) {
    const auto before = std::find_if(tokens_.begin(), tokens_.end(), [&](const Token& token) {
      return token.digest == entry.digest && token.grant->token_name == entry.name &&
             token.grant->name_space == entry.name_space;
    });
    // A token that stays keeps its grant, so that its open streams continue.
    tokens.push_back({entry.digest, before != tokens_.end()
                                        ? before->grant
                                        : std::make_shared<Grant>(entry.name, entry.name_space)});
    accounts_->Of(entry.name_space)->SetQuota(entry.quota);
  }
  for (const Token& token : tokens_) {
    const bool stays = std::any_of(tokens.begin(), tokens.end(),
                                   [&](const Token& other) { return other.grant == token.grant; });
    if (!stays) token.grant->revoked = true;
  }
  tokens_ = std::move(tokens);
  return absl::OkStatus();
}

absl::StatusOr<bool> TokenTable::Reload() {
  absl::StatusOr<RegularFile> read = file_.Read(WatchedFile::kTurn);
  if (read == seen_) return false;
  seen_ = std::move(read);
  RETURN_IF_ERROR(seen_.status());
  RETURN_IF_ERROR(Take(*seen_));
  return true;
}

size_t TokenTable::size() const {
  const MutexLock lock(mutex_);
  return tokens_.size();
}

}  // namespace spillway

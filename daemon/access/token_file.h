#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/engine/account.h"

namespace spillway {

using TokenDigest = std::array<uint8_t, 32>;

// SHA-256. Tokens have 256 bits of chance, of which no digest lets anybody guess one.
TokenDigest DigestOf(std::string_view token);

// One entry of the file.
struct TokenEntry {
  std::string name;
  std::string name_space;
  TokenDigest digest = {};
  Quota quota;
};

// The text of a file that users of this machine beyond its owner and group can neither read nor
// write. INVALID_ARGUMENT where they can, or it cannot be read; names the path.
absl::StatusOr<std::string> ReadTokenFile(const std::string& path);

// The entries of such a text, TOML:
//
//   [[token]]
//   name = "alice"
//   sha256 = "..."            # of the token, 64 hexadecimal digits
//   namespace = "alice"       # by default the name
//   bytes_max = "64GiB"       # rows and index of the namespace's sequences; by default no limit
//   sequence_count_max = 100  # by default no limit
//
// INVALID_ARGUMENT names the entry and the key: one that is unknown, missing or wrong, two entries
// of a name or a digest, two of a namespace with other quotas.
absl::StatusOr<std::vector<TokenEntry>> ParseTokens(const std::string& text,
                                                    const std::string& path);

}  // namespace spillway

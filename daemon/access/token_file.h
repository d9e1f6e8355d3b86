#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/account.h"
#include "host/base/regular_file.h"

namespace spillway {

using TokenDigest = std::array<uint8_t, 32>;

// SHA-256. Tokens have 256 random bits, so they cannot be guessed from their digests.
TokenDigest DigestOf(std::string_view token);

// One entry of the tokens file.
struct TokenEntry {
  std::string name;
  std::string name_space;
  TokenDigest digest = {};
  Quota quota;
};

// The most bytes of a tokens file: some 10,000 tokens, which take the parser a second or two.
inline constexpr int64_t kTokenFileBytesMax = int64_t{1} << 20;

// The entries of a tokens file, which only its owner and group may read or write, in TOML:
//
//   [[token]]
//   name = "alice"
//   sha256 = "..."            # of the token, 64 hexadecimal digits
//   namespace = "alice"       # default: the name
//   bytes_max = "64GiB"       # rows and index of the namespace's sequences; default: no limit
//   sequence_count_max = 100  # default: no limit
//
// INVALID_ARGUMENT, with the path, if others may read or write it. It names the entry and the key
// if a key is unknown, missing or wrong, if two entries have the same name or digest, or if two
// entries of a namespace have different quotas.
absl::StatusOr<std::vector<TokenEntry>> ParseTokens(const RegularFile& file,
                                                    const std::string& path);

}  // namespace spillway

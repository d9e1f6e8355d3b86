#include "daemon/access/token_file.h"

#include <openssl/sha.h>
#include <sys/stat.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "daemon/config/toml_text.h"
#include "engine/registry.h"
#include "host/base/status_macros.h"
#include "services/config/config.h"

namespace spillway {
namespace {

absl::Status Wrong(const std::string& path, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", what));
}

absl::StatusOr<std::string> TextOf(const toml::value& value) {
  if (value.is_string()) return value.as_string().str;
  return absl::InvalidArgumentError("is not a string");
}

absl::StatusOr<std::string> IdOf(const toml::value& value) {
  ASSIGN_OR_RETURN(std::string text, TextOf(value));
  if (Registry::IsValidId(text)) return text;
  return absl::InvalidArgumentError(absl::StrCat(
      "\"", absl::CHexEscape(text), "\" does not match [a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?"));
}

absl::StatusOr<TokenDigest> DigestFrom(const toml::value& value) {
  ASSIGN_OR_RETURN(const std::string text, TextOf(value));
  TokenDigest digest;
  const bool hexadecimal = std::all_of(text.begin(), text.end(),
                                       [](unsigned char c) { return absl::ascii_isxdigit(c); });
  if (text.size() != 2 * digest.size() || !hexadecimal) {
    return absl::InvalidArgumentError("is not the 64 hexadecimal digits of a SHA-256");
  }
  const std::string bytes = absl::HexStringToBytes(text);
  std::copy(bytes.begin(), bytes.end(), digest.begin());
  return digest;
}

absl::StatusOr<int64_t> CountFrom(const toml::value& value) {
  if (value.is_integer() && value.as_integer() > 0) return value.as_integer();
  return absl::InvalidArgumentError("is not an integer above 0");
}

absl::StatusOr<int64_t> BytesFrom(const toml::value& value) {
  if (!value.is_string()) return CountFrom(value);
  return ParseBytes(value.as_string().str);
}

absl::Status Take(const std::string& key, const toml::value& value, TokenEntry& entry) {
  if (key == "name") {
    ASSIGN_OR_RETURN(entry.name, IdOf(value));
  } else if (key == "namespace") {
    ASSIGN_OR_RETURN(entry.name_space, IdOf(value));
  } else if (key == "sha256") {
    ASSIGN_OR_RETURN(entry.digest, DigestFrom(value));
  } else if (key == "bytes_max") {
    ASSIGN_OR_RETURN(entry.quota.bytes_max, BytesFrom(value));
  } else if (key == "sequence_count_max") {
    ASSIGN_OR_RETURN(entry.quota.sequence_count_max, CountFrom(value));
  } else {
    return absl::InvalidArgumentError("is unknown");
  }
  return absl::OkStatus();
}

absl::StatusOr<TokenEntry> EntryFrom(const toml::value& table) {
  if (!table.is_table()) return absl::InvalidArgumentError("is not a table");
  TokenEntry entry;
  for (const char* needed : {"name", "sha256"}) {
    if (table.contains(needed)) continue;
    return absl::InvalidArgumentError(absl::StrCat(needed, " is missing"));
  }
  for (const auto& [key, value] : table.as_table()) {
    if (absl::Status status = Take(key, value, entry); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(key, ": ", status.message()));
    }
  }
  if (entry.name_space.empty()) entry.name_space = entry.name;
  return entry;
}

// Checks an entry against those before it.
absl::Status Compare(const TokenEntry& entry, const std::vector<TokenEntry>& before) {
  for (const TokenEntry& other : before) {
    const auto wrong = [&](const std::string& what) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, " of the earlier entry \"", other.name, "\""));
    };
    if (other.name == entry.name) return wrong("name: is that");
    if (other.digest == entry.digest) return wrong("sha256: is that");
    if (other.name_space == entry.name_space && !(other.quota == entry.quota)) {
      return wrong(absl::StrCat("namespace: ", entry.name_space, " has other quotas than those"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

TokenDigest DigestOf(std::string_view token) {
  TokenDigest digest;
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), digest.data());
  return digest;
}

absl::StatusOr<std::vector<TokenEntry>> ParseTokens(const RegularFile& file,
                                                    const std::string& path) {
  if ((file.mode & (S_IROTH | S_IWOTH)) != 0) {
    return Wrong(path, "others may read or write it: chmod o-rw it");
  }
  ASSIGN_OR_RETURN(const toml::value toml, ParseToml(file.text, path));
  std::vector<TokenEntry> entries;
  for (const auto& [key, value] : toml.as_table()) {
    if (key != "token" || !value.is_array()) {
      return Wrong(path, absl::StrCat("\"", key, "\" is unknown: entries are [[token]]"));
    }
    for (const toml::value& table : value.as_array()) {
      const std::string number = absl::StrCat("token ", entries.size() + 1);
      absl::StatusOr<TokenEntry> entry = EntryFrom(table);
      absl::Status status = entry.status();
      if (status.ok()) status = Compare(*entry, entries);
      if (!status.ok()) {
        return Wrong(path,
                     absl::StrCat(number, entry.ok() ? absl::StrCat(" \"", entry->name, "\"") : "",
                                  ": ", status.message()));
      }
      entries.push_back(*std::move(entry));
    }
  }
  return entries;
}

}  // namespace spillway

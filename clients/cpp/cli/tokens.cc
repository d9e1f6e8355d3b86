#include "cli/tokens.h"

#include <fcntl.h>
#include <openssl/rand.h>
#include <openssl/sha.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string_view>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "host/base/descriptor.h"
#include "host/base/status_macros.h"

namespace spillway::cli {
namespace {

// With this prefix, people and secret scanners recognise a token, for example in a log.
constexpr std::string_view kPrefix = "spillway_";

// The same rule as for the ids of models and sequences.
absl::Status CheckName(const std::string& name, const char* what) {
  const auto plain = [](unsigned char c) {
    return absl::ascii_islower(c) || absl::ascii_isdigit(c);
  };
  const bool fits = !name.empty() && name.size() <= 63 && plain(name.front()) &&
                    plain(name.back()) && std::all_of(name.begin(), name.end(), [&](char c) {
                      return plain(c) || std::strchr("._-", c) != nullptr;
                    });
  if (fits) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, " \"", absl::CHexEscape(name),
                                                 "\" does not match "
                                                 "[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?"));
}

absl::StatusOr<std::string> Draw() {
  std::array<unsigned char, 32> bytes;
  if (RAND_bytes(bytes.data(), static_cast<int>(bytes.size())) != 1) {
    return absl::InternalError("cannot get random bytes from the system");
  }
  const std::string text =
      absl::WebSafeBase64Escape({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  return absl::StrCat(std::string(kPrefix), text);
}

std::string DigestOf(const std::string& token) {
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest;
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), digest.data());
  return absl::BytesToHexString({reinterpret_cast<const char*>(digest.data()), digest.size()});
}

std::string EntryOf(const NewToken& asked, const std::string& token) {
  std::string entry =
      absl::StrCat("[[token]]\nname = \"", asked.name, "\"\nsha256 = \"", DigestOf(token), "\"\n");
  if (!asked.name_space.empty()) {
    absl::StrAppend(&entry, "namespace = \"", asked.name_space, "\"\n");
  }
  if (!asked.bytes_max.empty()) absl::StrAppend(&entry, "bytes_max = \"", asked.bytes_max, "\"\n");
  if (asked.sequence_count_max > 0) {
    absl::StrAppend(&entry, "sequence_count_max = ", asked.sequence_count_max, "\n");
  }
  return entry;
}

absl::Status Append(const std::string& path, const std::string& entry) {
  const Descriptor file(
      open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  const std::string text = absl::StrCat("\n", entry);
  // One write: a daemon that reads the file meanwhile sees the whole entry or nothing.
  if (!file.valid() ||
      write(file.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    return absl::UnavailableError(absl::StrCat("cannot write ", path, ": ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status MakeToken(const NewToken& asked, const Output& output) {
  RETURN_IF_ERROR(CheckName(asked.name, "the name"));
  if (!asked.name_space.empty()) RETURN_IF_ERROR(CheckName(asked.name_space, "the namespace"));
  ASSIGN_OR_RETURN(const std::string token, Draw());
  const std::string entry = EntryOf(asked, token);
  if (!asked.file.empty()) RETURN_IF_ERROR(Append(asked.file, entry));
  if (output.json) {
    nlohmann::json json = {{"token", token}};
    if (asked.file.empty()) json["entry"] = entry;
    output.out << json.dump(2) << "\n";
  } else if (!asked.file.empty()) {
    output.out << token << "\n";
  } else {
    output.out << "The token, which is shown only once:\n\n  " << token
               << "\n\nThe entry for the file that the daemon's auth.tokens_file names:\n\n"
               << entry;
  }
  return absl::OkStatus();
}

}  // namespace spillway::cli

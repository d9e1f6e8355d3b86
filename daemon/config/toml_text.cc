#include "daemon/config/toml_text.h"

#include <algorithm>
#include <exception>
#include <sstream>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

constexpr int kTomlDepthMax = 16;
// The parser searches the whole line for each value on it.
constexpr size_t kLineBytesMax = 4096;
// Of an error of the parser, which shows the line.
constexpr size_t kErrorBytesMax = 1000;

absl::Status Malformed(const std::string& name, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(name, ": ", what.substr(0, kErrorBytesMax)));
}

// The end of the string that begins with the quote at `at`. A string on one line that is not closed
// ends with the line; there the parser stops.
size_t EndOfString(std::string_view text, size_t at) {
  const char quote = text[at];
  const std::string three(3, quote);
  const bool is_long = text.substr(at, 3) == three;
  for (at += is_long ? 3 : 1; at < text.size(); ++at) {
    if (text[at] == '\\' && quote == '"') {
      ++at;
    } else if (!is_long && (text[at] == quote || text[at] == '\n')) {
      return at + (text[at] == quote ? 1 : 0);
    } else if (is_long && text.substr(at, 3) == three) {
      at += 3;
      // Up to two quotes before the closing ones belong to the string.
      for (int more = 0; more < 2 && at < text.size() && text[at] == quote; ++more) ++at;
      return at;
    }
  }
  return text.size();
}

absl::Status CheckLines(std::string_view text, const std::string& name) {
  int line = 1;
  for (size_t at = 0; at < text.size(); ++line) {
    const size_t end = std::min(text.find('\n', at), text.size());
    if (end - at > kLineBytesMax) {
      return Malformed(name,
                       absl::StrCat("line ", line, " has more than ", kLineBytesMax, " bytes"));
    }
    at = end + 1;
  }
  return absl::OkStatus();
}

absl::Status CheckDepth(std::string_view text, const std::string& name) {
  int brackets = 0;  // that are open
  int dots = 0;      // of the key
  int line = 1;
  for (size_t at = 0; at < text.size();) {
    const char c = text[at];
    if (c == '"' || c == '\'') {
      const size_t end = EndOfString(text, at);
      line += static_cast<int>(std::count(text.begin() + at, text.begin() + end, '\n'));
      at = end;
      continue;
    }
    if (c == '#') {
      at = std::min(text.find('\n', at), text.size());
      continue;
    }
    if (c == '\n') ++line;
    if (c == '[' || c == '{') ++brackets;
    if (c == ']' || c == '}') brackets = std::max(brackets - 1, 0);
    if (c == '.') {
      ++dots;
    } else if (std::string_view("[]{}=,\n").find(c) != std::string_view::npos) {
      dots = 0;
    }
    if (brackets + dots > kTomlDepthMax) {
      return Malformed(name, absl::StrCat("line ", line, " is nested more than ", kTomlDepthMax,
                                          " levels deep"));
    }
    ++at;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<toml::value> ParseToml(const std::string& text, const std::string& name) {
  RETURN_IF_ERROR(CheckLines(text, name));
  RETURN_IF_ERROR(CheckDepth(text, name));
  try {
    std::istringstream stream(text);
    return toml::parse(stream, name);
  } catch (const std::exception& error) {
    return Malformed(name, error.what());
  }
}

}  // namespace spillway

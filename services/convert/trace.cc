#include "services/convert/trace.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/errors.h"

namespace spillway {
namespace {

constexpr size_t kRequestIdCharsMax = 128;

bool IsHex(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return absl::ascii_isdigit(c) || (c >= 'a' && c <= 'f');
  });
}

bool IsId(std::string_view text) {
  return IsHex(text) && text.find_first_not_of('0') != std::string_view::npos;
}

}  // namespace

std::string TraceIdOf(std::string_view text) {
  // Later versions may have more fields after the flags.
  constexpr size_t kSize = 55;
  if (text.size() < kSize || text[2] != '-' || text[35] != '-' || text[52] != '-') return "";
  const std::string_view version = text.substr(0, 2), trace = text.substr(3, 32);
  if (!IsHex(version) || version == "ff" || !IsHex(text.substr(53, 2))) return "";
  if (text.size() > kSize && (version == "00" || text[kSize] != '-')) return "";
  return IsId(trace) && IsId(text.substr(36, 16)) ? std::string(trace) : "";
}

std::string RequestIdOf(std::string_view text) {
  if (text.size() > kRequestIdCharsMax) return "";
  const bool fits = std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) ||
           std::string_view("._:=+/-").find(static_cast<char>(c)) != std::string_view::npos;
  });
  return fits ? std::string(text) : "";
}

absl::Status CheckTraceId(std::string_view text) {
  if (text.empty() || !RequestIdOf(text).empty()) return absl::OkStatus();
  return InvalidField(
      "trace_id",
      absl::StrCat("\"", absl::CHexEscape(std::string(text.substr(0, kRequestIdCharsMax))), "\", ",
                   text.size(), " characters, is not 1 to ", kRequestIdCharsMax,
                   " characters of [A-Za-z0-9._:=+/-]"));
}

}  // namespace spillway

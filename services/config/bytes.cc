#include <array>
#include <charconv>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "services/config/config.h"

namespace spillway {
namespace {

constexpr std::array<std::pair<const char*, int>, 5> kSuffixes = {
    {{"TiB", 40}, {"GiB", 30}, {"MiB", 20}, {"KiB", 10}, {"B", 0}}};

}  // namespace

absl::StatusOr<int64_t> ParseBytes(const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const absl::string_view suffix = absl::StripAsciiWhitespace(
      absl::string_view(end, static_cast<size_t>(text.data() + text.size() - end)));
  int shift = suffix.empty() ? 0 : -1;
  for (const auto& [name, bits] : kSuffixes) {
    if (suffix == name) shift = bits;
  }
  if (error != std::errc() || shift < 0 || value < 1 ||
      value > (std::numeric_limits<int64_t>::max() >> shift)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"", text, "\" is not a size of at least one byte, such as 1048576, 512MiB or 64GiB"));
  }
  return value << shift;
}

std::string FormatBytes(int64_t bytes) {
  for (const auto& [name, bits] : kSuffixes) {
    if (bits > 0 && bytes > 0 && bytes % (int64_t{1} << bits) == 0) {
      return absl::StrCat(bytes >> bits, name);
    }
  }
  return absl::StrCat(bytes);
}

}  // namespace spillway

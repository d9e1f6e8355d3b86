#include "cli/output.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

namespace spillway::cli {

void Table::Print(std::ostream& out) const {
  std::vector<size_t> widths(rows_.front().size(), 0);
  for (const auto& row : rows_) {
    for (size_t column = 0; column < row.size(); ++column) {
      widths[column] = std::max(widths[column], row[column].size());
    }
  }
  for (const auto& row : rows_) {
    std::string line = absl::StrFormat("%-*s", static_cast<int>(widths[0]), row[0]);
    for (size_t column = 1; column < row.size(); ++column) {
      absl::StrAppendFormat(&line, "  %*s", static_cast<int>(widths[column]), row[column]);
    }
    out << line << '\n';
  }
}

std::string FullName(const std::string& collection, const std::string& name) {
  return absl::StartsWith(name, collection + "/") ? name : absl::StrCat(collection, "/", name);
}

std::string ShortName(const std::string& name) { return name.substr(name.find('/') + 1); }

std::string FormatBytes(int64_t bytes) {
  constexpr std::array kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.*f %s", value < 10 ? 2 : 1, value, kUnits[unit]);
}

std::string FormatCount(int64_t count) {
  const std::string digits = absl::StrCat(count);
  std::string text;
  for (size_t at = 0; at < digits.size(); ++at) {
    const bool follows_digit = at > 0 && digits[at - 1] != '-';
    if (follows_digit && (digits.size() - at) % 3 == 0) text += ',';
    text += digits[at];
  }
  return text;
}

std::string FormatShare(double part, double whole) {
  if (whole == 0) return "-";
  return absl::StrFormat("%.1f %%", 100 * part / whole);
}

std::string DTypeName(v1::DType dtype) {
  return absl::AsciiStrToLower(absl::StripPrefix(v1::DType_Name(dtype), "DTYPE_"));
}

std::string FormatAge(absl::Duration age) {
  struct Unit {
    const char* name;
    absl::Duration size;
  };
  const std::array<Unit, 4> units = {{{"d", absl::Hours(24)},
                                      {"h", absl::Hours(1)},
                                      {"min", absl::Minutes(1)},
                                      {"s", absl::Seconds(1)}}};
  std::string text;
  int shown = 0;
  for (const Unit& unit : units) {
    absl::Duration rest;
    const int64_t count = absl::IDivDuration(age, unit.size, &rest);
    const bool last = unit.size == absl::Seconds(1);
    if (count == 0 && !(last && shown == 0)) {
      if (shown > 0) break;
      continue;
    }
    absl::StrAppend(&text, shown > 0 ? " " : "", count, " ", unit.name);
    age = rest;
    if (++shown == 2) break;
  }
  return text;
}

}  // namespace spillway::cli

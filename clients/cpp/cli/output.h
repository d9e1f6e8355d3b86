// Text output: tables, and numbers with units.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "spillway/v1/tensor.pb.h"

namespace spillway::cli {

// A table whose columns are as wide as their widest cell. The first column is aligned left, the
// others right.
class Table {
 public:
  explicit Table(std::vector<std::string> headers) : rows_{std::move(headers)} {}

  // REQUIRES: there are as many cells as headers.
  void AddRow(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }

  void Print(std::ostream& out) const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// Returns "{collection}/{id}" for this name or for "{id}".
std::string FullName(const std::string& collection, const std::string& name);
// The id in a name such as "sequences/{id}".
std::string ShortName(const std::string& name);

// For example "1.5 GiB".
std::string FormatBytes(int64_t bytes);

// For example "1,234,567".
std::string FormatCount(int64_t count);

// `part` of `whole`, for example "12.3 %"; "-" if the whole is 0.
std::string FormatShare(double part, double whole);

// DTYPE_BF16 -> "bf16".
std::string DTypeName(v1::DType dtype);

// For example "3 d 4 h", "5 min", "12 s": at most two units.
std::string FormatAge(absl::Duration age);

}  // namespace spillway::cli

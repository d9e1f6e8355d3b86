// How the tool writes: tables and units for people.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "spillway/v1/tensor.pb.h"

namespace spillway::cli {

// Columns as wide as their widest cell; the first is aligned left, the others
// right.
class Table {
 public:
  explicit Table(std::vector<std::string> headers) : rows_{std::move(headers)} {}

  // REQUIRES: as many cells as headers.
  void AddRow(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }

  void Print(std::ostream& out) const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// "sequences/{id}" of that or of the id alone.
std::string FullName(const std::string& collection, const std::string& name);
// The id of a name "sequences/{id}", for tables.
std::string ShortName(const std::string& name);

// "1.5 GiB".
std::string FormatBytes(int64_t bytes);

// "1,234,567".
std::string FormatCount(int64_t count);

// "12.3 %" of the whole; "-" when the whole is 0.
std::string FormatShare(double part, double whole);

// "bf16" of DTYPE_BF16.
std::string DTypeName(v1::DType dtype);

// "3 d 4 h", "5 min", "12 s": two units at most.
std::string FormatAge(absl::Duration age);

}  // namespace spillway::cli

#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "host/model/model_spec.h"

namespace spillway {

// The reason for refusing a field that names a method, or is read by one, that is not in this
// build.
inline constexpr std::string_view kNoSuchMethod = "this build has no such method";

// Collects the fields of a message that are out of range. Each check returns whether the value is
// valid.
class FieldChecks {
 public:
  void Add(std::string_view field, std::string description) {
    errors_.push_back({std::string(field), std::move(description)});
  }
  bool InRange(std::string_view field, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return true;
    Add(field, absl::StrCat("value ", value, " is not in [", low, ", ", high, "]"));
    return false;
  }
  // value must be a multiple of step in [step, high].
  bool MultipleInRange(std::string_view field, int64_t value, int64_t step, int64_t high) {
    if (value >= step && value <= high && value % step == 0) return true;
    Add(field, absl::StrCat("value ", value, " is not a multiple of ", step, " in [", step, ", ",
                            high, "]"));
    return false;
  }
  // value must be in (0, high], or in (0, high) unless closed. NaN is invalid.
  bool Positive(std::string_view field, double value, double high, bool closed) {
    if (value > 0 && (closed ? value <= high : value < high)) return true;
    Add(field, absl::StrCat("value ", value, " is not in (0, ", high, closed ? "]" : ")"));
    return false;
  }
  std::vector<FieldError> Take() { return std::move(errors_); }

 private:
  std::vector<FieldError> errors_;
};

}  // namespace spillway

#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace spillway::cli {

// Becomes `spillway-lab size` of the Python package, which reads configs of models as transformers
// does. arguments: all that follow "size". Returns only if that fails: NOT_FOUND if there is no
// spillway-lab in PATH.
absl::Status RunLabSize(const std::vector<std::string>& arguments);

}  // namespace spillway::cli

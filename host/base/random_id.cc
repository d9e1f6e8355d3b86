#include "host/base/random_id.h"

#include <cstdint>
#include <random>

#include "absl/strings/str_format.h"

namespace spillway {

std::string RandomId() {
  std::random_device random;
  const auto word = [&] { return static_cast<uint32_t>(random()); };
  return absl::StrFormat("%08x%08x%08x", word(), word(), word());
}

}  // namespace spillway

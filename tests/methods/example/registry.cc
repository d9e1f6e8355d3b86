// The shelf of the example's tests, in place of host/methods/registry.cc.
#include "tests/methods/example/prefix.h"

namespace spillway {

std::span<const Method* const> ShelfMethods() {
  static constexpr const Method* kMethods[] = {&kPrefixMethod};
  return kMethods;
}

}  // namespace spillway

// The optional methods of the example's tests. Replaces host/methods/registry.cc.
#include "tests/methods/example/prefix.h"

namespace spillway {

std::span<const Method* const> OptionalMethods() {
  static constexpr const Method* kMethods[] = {&kPrefixMethod};
  return kMethods;
}

}  // namespace spillway

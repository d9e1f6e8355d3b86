// The optional methods of this build.

#include "host/policy/method.h"

// One line per method, in the order of their sections in an index page. The folder of each method
// defines it as a `const Method`.
#define SPILLWAY_OPTIONAL_METHODS(METHOD) \
  METHOD(kHammingMethod)                  \
  METHOD(kInt4KeysMethod)                 \
  METHOD(kDoubleSparsityMethod)           \
  METHOD(kQuestMethod)                    \
  METHOD(kLshSamplingMethod)              \
  METHOD(kTwoStageMethod)

namespace spillway {

#define SPILLWAY_DECLARE(method) extern const Method method;
#define SPILLWAY_ADDRESS(method) &method,
SPILLWAY_OPTIONAL_METHODS(SPILLWAY_DECLARE)

std::span<const Method* const> OptionalMethods() {
  static constexpr const Method* kMethods[] = {SPILLWAY_OPTIONAL_METHODS(SPILLWAY_ADDRESS)};
  return kMethods;
}

}  // namespace spillway

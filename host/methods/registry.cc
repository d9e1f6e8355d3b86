// The methods of this build's shelf.

#include "host/policy/method.h"

// A line each, in the order in which index pages hold their sections. A method's
// folder defines it as a `const Method`.
#define SPILLWAY_SHELF(METHOD)  \
  METHOD(kHammingMethod)        \
  METHOD(kSketchMethod)         \
  METHOD(kDoubleSparsityMethod) \
  METHOD(kQuestMethod)          \
  METHOD(kLshSamplingMethod)    \
  METHOD(kTwoStageMethod)

namespace spillway {

#define SPILLWAY_DECLARE(method) extern const Method method;
#define SPILLWAY_ADDRESS(method) &method,
SPILLWAY_SHELF(SPILLWAY_DECLARE)

std::span<const Method* const> ShelfMethods() {
  static constexpr const Method* kMethods[] = {SPILLWAY_SHELF(SPILLWAY_ADDRESS)};
  return kMethods;
}

}  // namespace spillway

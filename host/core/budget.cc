#include "host/core/budget.h"

#include "host/core/normal.h"

namespace spillway {

double BoundQuantile(Bound bound, double delta) {
  return NormalQuantile(1 - delta / (bound == Bound::kPaper ? 4 : 2));
}

}  // namespace spillway

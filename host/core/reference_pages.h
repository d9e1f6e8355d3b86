#pragma once

#include <cstdint>

#include "host/base/host_device.h"
#include "host/base/limits.h"

namespace spillway {

// The pages of keys from which the reference logits of scores are taken: every 64th page, beginning
// with the first scored token's page. If there are fewer than 1,024 pages, the step is smaller, so
// that there are at least 16 pages, or all of them.
struct ReferencePages {
  int64_t first = 0;
  int64_t step = 1;
  int64_t count = 0;

  // The scored tokens are [begin, end). REQUIRES: begin < end.
  SPILLWAY_HOST_DEVICE static ReferencePages Of(int64_t begin, int64_t end) {
    ReferencePages r;
    r.first = begin / kPageTokenCount;
    const int64_t last = (end - 1) / kPageTokenCount;
    const int64_t sixteenth = (last - r.first) / 16;
    r.step = sixteenth < 1 ? 1 : sixteenth > 64 ? 64 : sixteenth;
    r.count = (last - r.first) / r.step + 1;
    return r;
  }
  SPILLWAY_HOST_DEVICE int64_t page(int64_t i) const { return first + step * i; }
};

}  // namespace spillway

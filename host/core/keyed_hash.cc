#include "host/core/keyed_hash.h"

namespace spillway {

uint32_t TokensBelow(const SampleKey& key, uint32_t first, uint32_t limit) {
  const SampleKey copy = key;
  uint32_t below = 0;
  for (uint32_t bit = 0; bit < 32; ++bit) {
    below |= static_cast<uint32_t>(TokenHash(copy, first + bit) < limit) << bit;
  }
  return below;
}

}  // namespace spillway

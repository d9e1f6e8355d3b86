#pragma once

#include <cstdint>
#include <vector>

#include "host/cpu/group_sums.h"

namespace spillway {

// A tail that finds its tokens by itself and weighs their rows: no sample, no
// promise. Thread-safe.
class MethodTail : public RowWeigher {
 public:
  // Tokens that some query head takes, ascending. Row i of Weigh() is tokens()[i]'s.
  virtual const std::vector<uint32_t>& tokens() const = 0;
};

}  // namespace spillway

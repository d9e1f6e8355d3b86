#pragma once

#include <cstdint>
#include <vector>

#include "host/cpu/group_sums.h"

namespace spillway {

// A tail that finds its tokens by itself and weighs their rows. It draws no sample and promises no
// bound. Thread-safe.
class MethodTail : public RowWeigher {
 public:
  // Tokens that at least one query head takes, ascending. Row i of Weigh() is that of tokens()[i].
  virtual const std::vector<uint32_t>& tokens() const = 0;
};

}  // namespace spillway

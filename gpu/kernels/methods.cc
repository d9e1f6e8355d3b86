#include "gpu/kernels/methods.h"

#include <algorithm>
#include <array>

#include "gpu/kernels/core_selectors.h"

namespace spillway::cuda {
namespace {

constexpr std::array kCoreSelectors = {
    SelectorKernels{Selector::kAsymmetric, ScoreBins, LaunchAsymmetricPrepare,
                    LaunchAsymmetricReference, LaunchAsymmetricScore},
    SelectorKernels{Selector::kOracle, ScoreBins, LaunchClearUnits, LaunchExactReference,
                    LaunchExactScore},
};

// The entry whose `member` equals `value`, or null.
template <typename Kernels, typename Value>
const Kernels* Find(std::span<const Kernels> list, Value Kernels::*member, Value value) {
  const auto found = std::ranges::find(list, value, member);
  return found == list.end() ? nullptr : &*found;
}

}  // namespace

const SelectorKernels* FindSelectorKernels(Selector selector) {
  const SelectorKernels* core =
      Find(std::span<const SelectorKernels>(kCoreSelectors), &SelectorKernels::selector, selector);
  return core != nullptr ? core
                         : Find(BuiltMethods().selectors, &SelectorKernels::selector, selector);
}

const TailKernels* FindTailKernels(Tail tail) {
  return Find(BuiltMethods().tails, &TailKernels::tail, tail);
}

bool IsSampled(Tail tail) {
  return tail == Tail::kNone || tail == Tail::kUniform || tail == Tail::kStratified ||
         FindTailKernels(tail) != nullptr;
}

}  // namespace spillway::cuda

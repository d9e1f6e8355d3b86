// The optional methods, one line each.
#include <array>

#include "gpu/kernels/methods.h"
#include "gpu/methods/launchers.h"

namespace spillway::cuda {
namespace {

constexpr std::array kSelectors = {
    SelectorKernels{Selector::kHamming, HammingBins, LaunchHammingPrepare, LaunchHammingReference,
                    LaunchHammingScore},
    SelectorKernels{Selector::kInt4Keys, ScoreBins, LaunchClearUnits, LaunchInt4Reference,
                    LaunchInt4Score},
    SelectorKernels{Selector::kQuest, ScoreBins, LaunchClearUnits, LaunchQuestReference,
                    LaunchQuestScore},
    SelectorKernels{Selector::kDoubleSparsity, ScoreBins, LaunchClearUnits, LaunchInt4Reference,
                    LaunchInt4Score},
};

constexpr std::array kTails = {
    TailKernels{Tail::kLshSampling, "LSH sample", LaunchLshSample, LaunchLshFold},
};

constexpr FirstSelectionKernels kFirstSelection = {LaunchFindCandidates, LaunchDropOthers};

constexpr MethodKernels kMethods = {kSelectors, kTails, &kFirstSelection};

}  // namespace

const MethodKernels& BuiltMethods() { return kMethods; }

}  // namespace spillway::cuda

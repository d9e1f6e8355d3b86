#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "gpu/kernels/attend.h"
#include "host/core/selector.h"
#include "host/core/tail.h"
#include "host/model/model_spec.h"

// The kernels of a wave that its policy chooses: of its selector, its first selection and its tail.
// The core has those of `asymmetric` and `oracle`; gpu/methods, if it is built, lists the others.
namespace spillway::cuda {

// How a selector scores the tokens of a wave: launchers, in the order of an attend. Afterwards
// every token has its bin, and every unit its histogram.
struct SelectorKernels {
  Selector selector;
  // Number of bins of the histogram.
  int (*bin_count)(const ModelSpec& spec);
  // Launches the wave's first kernel, which reads requests and queries from pinned memory. It may
  // overlap with an append if PrepareOverlaps() says so.
  cudaError_t (*prepare)(const Wave& wave, cudaStream_t stream);
  // Computes what scores are relative to (UnitState::reference and mass).
  cudaError_t (*reference)(const Wave& wave, cudaStream_t stream);
  cudaError_t (*score)(const Wave& wave, cudaStream_t stream);
};

// A tail that samples in its own way, in place of the second draw.
struct TailKernels {
  Tail tail;
  const char* stage;  // its name in traces
  // Finds and lists the sample's rows.
  cudaError_t (*sample)(const Wave& wave, cudaStream_t stream);
  // Sums over these rows.
  cudaError_t (*fold)(const Wave& wave, cudaStream_t stream);
};

struct FirstSelectionKernels {
  // Finds the candidates, after the scores of the first selection.
  cudaError_t (*find)(const Wave& wave, cudaStream_t stream);
  // Drops all tokens that are not candidates, after the scores of the main selector.
  cudaError_t (*drop_others)(const Wave& wave, cudaStream_t stream);
};

// What gpu/methods adds.
struct MethodKernels {
  std::span<const SelectorKernels> selectors;
  std::span<const TailKernels> tails;
  const FirstSelectionKernels* first_selection = nullptr;
};
const MethodKernels& BuiltMethods();

// The core's or a method's; null for SELECTOR_ALL, which scores nothing, and if this build has
// none.
const SelectorKernels* FindSelectorKernels(Selector selector);
// The kernels of a method's tail; null for tails that the core draws.
const TailKernels* FindTailKernels(Tail tail);
// Whether the core or a method of this build can sample the tail.
bool IsSampled(Tail tail);

// For launchers of SelectorKernels: the bins of scores by logits, whether the first kernel may
// overlap with an append, and the prepare and mass kernels that selectors share.
int ScoreBins(const ModelSpec& spec);
bool PrepareOverlaps(const Wave& wave);
cudaError_t LaunchClearUnits(const Wave& wave, cudaStream_t stream);
cudaError_t LaunchReferenceMass(const Wave& wave, cudaStream_t stream);

}  // namespace spillway::cuda

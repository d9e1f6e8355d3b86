#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "gpu/kernels/attend.h"
#include "host/core/selector.h"
#include "host/core/tail.h"
#include "host/model/model_spec.h"

// The kernels of a wave that a policy chooses: those of its selector, of its
// first selection and of its tail. The core has those of the default way;
// gpu/methods, where it is built, lists the others.
namespace spillway::cuda {

// How a selector scores the tokens of a wave. Launchers, in the order of an
// attend; afterwards every token has its bin and every unit its histogram.
struct SelectorKernels {
  Selector selector;
  // Bins of the histogram.
  int (*bin_count)(const ModelSpec& spec);
  // The wave's first kernel: reads requests and queries in pinned memory. It
  // may overlap as PrepareOverlaps() says.
  cudaError_t (*prepare)(const Wave& wave, cudaStream_t stream);
  // What scores are relative to.
  cudaError_t (*reference)(const Wave& wave, cudaStream_t stream);
  cudaError_t (*score)(const Wave& wave, cudaStream_t stream);
};

// A tail that samples in a way of its own, in place of the second draw.
struct TailKernels {
  Tail tail;
  const char* stage;  // its name in traces
  // Finds and lists the sample's rows.
  cudaError_t (*sample)(const Wave& wave, cudaStream_t stream);
  // Sums over them.
  cudaError_t (*fold)(const Wave& wave, cudaStream_t stream);
};

struct FirstSelectionKernels {
  // After the first selection's scores: finds the candidates.
  cudaError_t (*find)(const Wave& wave, cudaStream_t stream);
  // After the second's: takes what is no candidate out of them.
  cudaError_t (*drop_others)(const Wave& wave, cudaStream_t stream);
};

// What gpu/methods adds.
struct MethodKernels {
  std::span<const SelectorKernels> selectors;
  std::span<const TailKernels> tails;
  const FirstSelectionKernels* first_selection = nullptr;
};
const MethodKernels& BuiltMethods();

// The core's or a method's; null: this build has none. SELECTOR_ALL scores
// nothing and has none.
const SelectorKernels* FindSelectorKernels(Selector selector);
// A method's; null for the tails that the core draws.
const TailKernels* FindTailKernels(Tail tail);
// Whether the core or a method samples it.
bool IsSampled(Tail tail);

// For launchers of SelectorKernels: score bins of logits, and the prepare and
// mass kernels that do not depend on what is scored.
int ScoreBins(const ModelSpec& spec);
bool PrepareOverlaps(const Wave& wave);
cudaError_t LaunchClearUnits(const Wave& wave, cudaStream_t stream);
cudaError_t LaunchReferenceMass(const Wave& wave, cudaStream_t stream);

}  // namespace spillway::cuda

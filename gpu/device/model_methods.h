#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "gpu/device/carver.h"
#include "gpu/device/packer.h"
#include "gpu/kernels/attend.h"
#include "gpu/kernels/encode.h"
#include "host/model/model_spec.h"
#include "host/policy/policy.h"

// The interface of the optional methods, which gpu/methods implements in builds that include them.
namespace spillway::cuda {

// One unit of a wave, for its methods.
struct MethodUnit {
  int layer = 0;
  int kv_head = 0;
  const float* centre = nullptr;  // device, [d]; null without one
};

// The methods of one model: their weights, what they store about keys, and what they need for a
// wave. Thread-safe once the weights are placed.
class ModelMethods {
 public:
  virtual ~ModelMethods() = default;

  // Adds the weights to the upload of the model. To be called once.
  virtual void AddWeights(Packer& packer) = 0;

  // Whether a method encodes keys, beside the rotation's codes or instead of them.
  virtual bool encodes() const = 0;
  // Encodes tokens [work.begin, work.end). Their centre is known. Does not wait.
  virtual cudaError_t Encode(const EncodeWork& work, int layer, cudaStream_t stream) const = 0;

  // Whether a policy's waves must contain all units of a query.
  virtual bool TakesWholeQueries(const Policy& policy) const = 0;
  // Makes room for a wave's methods; empty carvers only measure. The wave has unit_count units,
  // with the methods of one policy.
  virtual WaveMethods LayOut(const Policy& policy, int64_t unit_count, Carver& pinned,
                             Carver& workspace) const = 0;
  // The same for unit i. request: its n is set.
  virtual void LayOut(const WaveMethods& wave, const Policy& policy, int64_t i,
                      const MethodUnit& unit, const UnitRequest& request,
                      Carver& workspace) const = 0;
  // Launches work of a wave's methods before its kernels, outside its graph. q: pinned,
  // [units][G][d]. Does not wait.
  virtual cudaError_t LaunchAhead(const WaveMethods& wave, const Policy& policy, int layer,
                                  const float* q, int64_t unit_count,
                                  cudaStream_t stream) const = 0;
};

// The methods of a model; null if this build has none. safetensors and errors: as in
// Device::CreateModel().
absl::StatusOr<std::unique_ptr<ModelMethods>> CreateModelMethods(
    const ModelSpec& spec, std::span<const std::byte> safetensors);
// Bytes that methods use in an index page, after its codes.
int64_t SectionBytes(const ModelSpec& spec);
// Most bytes of weights that AddWeights() adds.
int64_t MethodWeightBytes(const ModelSpec& spec);

}  // namespace spillway::cuda

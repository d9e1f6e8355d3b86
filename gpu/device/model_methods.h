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

// What the device asks of the methods that stand beside the core. gpu/methods
// implements it where the build has it.
namespace spillway::cuda {

// One unit of a wave, for its methods.
struct MethodUnit {
  int layer = 0;
  int kv_head = 0;
  const float* centre = nullptr;  // device, [d]; null without one
};

// A model's part in the methods: their weights, what they keep of keys, what
// they ask of a wave. Thread-safe once the weights are placed.
class ModelMethods {
 public:
  virtual ~ModelMethods() = default;

  // Adds the weights to what is uploaded for the model. To be called once.
  virtual void AddWeights(Packer& packer) = 0;

  // Whether it encodes keys, beside the rotation's codes or in their place.
  virtual bool encodes() const = 0;
  // Encodes tokens [work.begin, work.end), whose centre is known. Nothing waits.
  virtual cudaError_t Encode(const EncodeWork& work, int layer, cudaStream_t stream) const = 0;

  // Whether a policy's waves take all units of a query together.
  virtual bool TakesWholeQueries(const Policy& policy) const = 0;
  // Makes room for a wave's methods, with empty carvers only measures. A wave
  // has unit_count units of one policy's methods.
  virtual WaveMethods LayOut(const Policy& policy, int64_t unit_count, Carver& pinned,
                             Carver& workspace) const = 0;
  // The same for unit i; request: its n is known.
  virtual void LayOut(const WaveMethods& wave, const Policy& policy, int64_t i,
                      const MethodUnit& unit, const UnitRequest& request,
                      Carver& workspace) const = 0;
  // What a wave's methods launch ahead of its kernels, and not as a part of its
  // graph. q: pinned, [units][G][d]. Nothing waits.
  virtual cudaError_t LaunchAhead(const WaveMethods& wave, const Policy& policy, int layer,
                                  const float* q, int64_t unit_count,
                                  cudaStream_t stream) const = 0;
};

// The methods of a model; null if this build has none. safetensors: as of
// Device::CreateModel(), whose errors it gives.
absl::StatusOr<std::unique_ptr<ModelMethods>> CreateModelMethods(
    const ModelSpec& spec, std::span<const std::byte> safetensors);
// Bytes of an index page that methods fill behind its codes.
int64_t SectionBytes(const ModelSpec& spec);
// Bytes of the weights that AddWeights() adds, at most.
int64_t MethodWeightBytes(const ModelSpec& spec);

}  // namespace spillway::cuda

#include "bench/gpu/handover/stream_values.h"

#include <string>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "gpu/cuda/error.h"

namespace spillway::bench {
namespace {

CUdeviceptr Address(uint32_t* word) { return reinterpret_cast<CUdeviceptr>(word); }

}  // namespace

absl::StatusOr<StreamValues> StreamValues::Load() {
  StreamValues values;
  absl::Status status;
  const auto load = [&](const char* name, auto& function) {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    if (!status.ok()) return;
    status = cuda::ToStatus(
        cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &result), name);
    if (status.ok() && (entry == nullptr || result != cudaDriverEntryPointSuccess)) {
      status = absl::UnimplementedError(absl::StrCat("the CUDA driver has no ", name));
    }
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(entry);
  };
  load("cuStreamWriteValue32", values.write_);
  load("cuStreamWaitValue32", values.wait_);
  load("cuGetErrorName", values.error_name_);
  if (!status.ok()) return status;
  return values;
}

absl::Status StreamValues::Check(CUresult result, const char* call) const {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* name = nullptr;
  if (error_name_(result, &name) != CUDA_SUCCESS) name = "unknown error";
  const std::string message = absl::StrCat(call, ": ", name);
  if (result == CUDA_ERROR_NOT_SUPPORTED) return absl::UnimplementedError(message);
  return absl::InternalError(message);
}

absl::Status StreamValues::Write(cudaStream_t stream, uint32_t* word, uint32_t value) const {
  return Check(write_(stream, Address(word), value, CU_STREAM_WRITE_VALUE_DEFAULT),
               "cuStreamWriteValue32");
}

absl::Status StreamValues::WaitUntilReached(cudaStream_t stream, uint32_t* word,
                                            uint32_t value) const {
  return Check(wait_(stream, Address(word), value, CU_STREAM_WAIT_VALUE_GEQ),
               "cuStreamWaitValue32");
}

}  // namespace spillway::bench

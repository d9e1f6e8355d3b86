#include "lib/interface.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"

namespace spillway {
namespace {

// The last failure in this thread.
thread_local absl::Status last_error;
thread_local std::string last_details;  // a serialised google.rpc.Status, or empty

// number: of spillway.v1.DType. nullopt: unknown.
std::optional<DType> DTypeOf(int32_t number) {
  switch (number) {
    case SPILLWAY_F32:
      return DType::kF32;
    case SPILLWAY_F16:
      return DType::kF16;
    case SPILLWAY_BF16:
      return DType::kBF16;
    default:
      return std::nullopt;
  }
}

template <typename Byte>
StepPlace<Byte> PlaceOf(const spillway_tensor& tensor) {
  return {static_cast<Byte*>(tensor.data), tensor.sequence_stride, tensor.token_stride,
          tensor.head_stride};
}

}  // namespace

int SetError(const absl::Status& status, std::string details) {
  last_details = std::move(details);
  last_error = status;
  return static_cast<int>(status.code());
}

int SetError(const absl::Status& status, const Embedded* engine, std::string_view trace) {
  return SetError(status,
                  engine != nullptr ? engine->DetailsOf(status, trace) : DaemonDetails(status));
}

int CodeOf(const absl::Status& status) { return status.ok() ? 0 : SetError(status); }

absl::StatusOr<StepTensors> TensorsOf(const spillway_step_tensors& from) {
  const std::optional<DType> q_dtype = DTypeOf(from.q_dtype);
  const std::optional<DType> out_dtype = DTypeOf(from.out_dtype);
  if (!q_dtype || !out_dtype || (*out_dtype != *q_dtype && *out_dtype != DType::kF32)) {
    return absl::InvalidArgumentError(
        absl::StrCat("q_dtype ", from.q_dtype, ", out_dtype ", from.out_dtype,
                     ": q_dtype must be SPILLWAY_F32, SPILLWAY_F16 or SPILLWAY_BF16, and out_dtype "
                     "the same or SPILLWAY_F32"));
  }
  for (const auto& [data, name] : {std::pair(from.q.data, "q"), std::pair(from.k.data, "k"),
                                   std::pair(from.v.data, "v"), std::pair(from.out.data, "out")}) {
    if (data == nullptr) return absl::InvalidArgumentError(absl::StrCat(name, ": is NULL"));
  }
  StepTensors tensors;
  tensors.q_dtype = *q_dtype;
  tensors.q = PlaceOf<const std::byte>(from.q);
  tensors.k = PlaceOf<const std::byte>(from.k);
  tensors.v = PlaceOf<const std::byte>(from.v);
  tensors.out_dtype = *out_dtype;
  tensors.out = PlaceOf<std::byte>(from.out);
  tensors.lse = from.lse;
  return tensors;
}

}  // namespace spillway

int spillway_error(const char** message, const void** details, size_t* details_size) {
  // A copy, because the text of a status need not end with NUL.
  thread_local std::string text;
  text = std::string(spillway::last_error.message());
  *message = text.c_str();
  *details = spillway::last_details.data();
  *details_size = spillway::last_details.size();
  return static_cast<int>(spillway::last_error.code());
}

#include "host/device/step_tensors.h"

#include <cstring>

namespace spillway {

void CopyStepRows(const StepRows& rows, const StepPlace<const std::byte>& from,
                  const StepPlace<std::byte>& to) {
  const bool heads_dense = from.head_stride == rows.bytes && to.head_stride == rows.bytes;
  const int64_t head_count = heads_dense ? 1 : rows.head_count;
  const auto bytes = static_cast<size_t>(heads_dense ? rows.bytes * rows.head_count : rows.bytes);
  for (int64_t i = 0; i < rows.sequence_count; ++i) {
    for (int64_t t = 0; t < rows.token_count; ++t) {
      for (int64_t h = 0; h < head_count; ++h) {
        std::memcpy(to.At(i) + t * to.token_stride + h * to.head_stride,
                    from.At(i) + t * from.token_stride + h * from.head_stride, bytes);
      }
    }
  }
}

}  // namespace spillway

#include "host/device/exact_attend.h"

#include <utility>

#include "host/base/parallel.h"
#include "host/base/status_macros.h"
#include "host/cpu/attend_context.h"
#include "host/device/results.h"

namespace spillway {

absl::StatusOr<std::vector<float>> ExactAttend(const ModelSpec& spec, int layer, AttendQuery attend,
                                               const CancelToken* cancel) {
  const SerialScope serial;
  attend.query_count = 1;
  attend.select_only = false;
  AttendResult result = AllocateResult(spec, attend);
  AttendContext context;
  context.shapes = &spec;
  context.layer = layer;
  context.attend = &attend;
  context.result = &result;
  context.cancel = cancel;
  RETURN_IF_ERROR(AttendDense(context, 0, 1));
  return std::move(result.out);
}

}  // namespace spillway

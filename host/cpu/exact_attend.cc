#include "host/device/exact_attend.h"

#include <utility>

#include "host/base/parallel.h"
#include "host/cpu/attend_context.h"
#include "host/device/results.h"

namespace spillway {

absl::StatusOr<std::vector<float>> ExactAttend(const ModelSpec& spec, int layer, AttendWork work,
                                               const CancelToken* cancel) {
  const SerialScope serial;
  work.query_count = 1;
  work.select_only = false;
  AllocateResults(spec, work);
  AttendContext context;
  context.shapes = &spec;
  context.layer = layer;
  context.work = &work;
  context.cancel = cancel;
  if (absl::Status status = AttendDense(context, 0, 1); !status.ok()) return status;
  return std::move(work.out);
}

}  // namespace spillway

#include "engine/step.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/checks.h"
#include "engine/errors.h"
#include "host/base/elements.h"
#include "host/base/limits.h"
#include "host/base/mutex.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

// Passes an outcome to the thread that waits for it.
class Waiter {
 public:
  void Set(absl::StatusOr<AttendOutcome> outcome) ABSL_LOCKS_EXCLUDED(mutex_) {
    const MutexLock lock(mutex_);
    outcome_.emplace(std::move(outcome));
    // Under the lock: the thread that waits may destroy this as soon as the lock is released.
    set_.NotifyOne();
  }
  absl::StatusOr<AttendOutcome> Wait() ABSL_LOCKS_EXCLUDED(mutex_) {
    const MutexLock lock(mutex_);
    while (!outcome_.has_value()) set_.Wait(mutex_);
    return *std::move(outcome_);
  }

 private:
  Mutex mutex_;
  CondVar set_;
  std::optional<absl::StatusOr<AttendOutcome>> outcome_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<Step>> Step::Create(Engine* engine, std::vector<Part> parts,
                                                   int64_t token_count, std::string trace) {
  RETURN_IF_ERROR(CheckStep(parts.size(), token_count));
  OneModel together;
  for (size_t i = 0; i < parts.size(); ++i) {
    RETURN_IF_ERROR(together.Add(*parts[i].sequence, absl::StrCat("parts[", i, "].sequence")));
  }
  return std::unique_ptr<Step>(new Step(engine, std::move(parts), token_count, std::move(trace)));
}

absl::StatusOr<AttendRequest> Step::RequestOf(int layer, const StepTensors& tensors) {
  const ModelSpec& spec = model().spec;
  if (layer < 0 || layer >= spec.layer_count) {
    return InvalidField("layer",
                        absl::StrCat("value ", layer, " is not in [0, ", spec.layer_count, ")"));
  }
  const int64_t q_bytes = spec.head_dim * DTypeBytes(tensors.q_dtype);
  const bool q_dense =
      tensors.q.head_stride == q_bytes &&
      (token_count_ == 1 || tensors.q.token_stride == spec.query_head_count * q_bytes);
  const int64_t q_part_bytes = token_count_ * spec.query_head_count * q_bytes;
  StepPlace<const std::byte> q = tensors.q;
  if (!q_dense) {
    q_.resize(parts_.size() * static_cast<size_t>(q_part_bytes));
    const StepPlace<std::byte> dense = {q_.data(), q_part_bytes, spec.query_head_count * q_bytes,
                                        q_bytes};
    CopyStepRows(
        {static_cast<int64_t>(parts_.size()), token_count_, spec.query_head_count, q_bytes},
        tensors.q, dense);
    q = dense;
  }
  AttendRequest request;
  request.layer = layer;
  request.trace = trace_;
  request.items.reserve(parts_.size());
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    const auto at = static_cast<int64_t>(i);
    AttendItem& item = request.items.emplace_back();
    item.sequence = part.sequence;
    Chunk& chunk = item.append.emplace();
    chunk.layer_start = layer;
    chunk.layer_count = 1;
    chunk.start = part.start;
    chunk.count = token_count_;
    chunk.generation = part.generation;
    chunk.k.first = {tensors.k.At(at), tensors.k.head_stride, tensors.k.token_stride};
    chunk.v.first = {tensors.v.At(at), tensors.v.head_stride, tensors.v.token_stride};
    RETURN_IF_ERROR(AtPart(i, CheckFinite(chunk, spec, "")));
    item.attend.policy = part.policy;
    item.attend.q_dtype = tensors.q_dtype;
    item.attend.query_count = token_count_;
    item.attend.q = q.At(at);
    RETURN_IF_ERROR(AtPart(i, CheckFinite(item.attend, spec, "q")));
  }
  return request;
}

absl::Status Step::AtPart(size_t index, const absl::Status& status) const {
  if (status.ok() || parts_.size() == 1) return status;
  return WithMessage(status, absl::StrCat(parts_[index].sequence->name, ": ", status.message()));
}

absl::Status Step::Attend(int layer, const StepTensors& tensors) {
  outcome_ = {};
  ASSIGN_OR_RETURN(AttendRequest request, RequestOf(layer, tensors));
  request.waited_for = true;
  Waiter waiter;
  engine_->Attend(std::move(request), [&waiter](absl::StatusOr<AttendOutcome> outcome) {
    waiter.Set(std::move(outcome));
  });
  return Take(tensors, waiter.Wait());
}

void Step::Start(int layer, const StepTensors& tensors, std::shared_ptr<CancelToken> cancel,
                 std::function<void(absl::Status)> done) {
  outcome_ = {};
  absl::StatusOr<AttendRequest> request = RequestOf(layer, tensors);
  if (!request.ok()) return done(request.status());
  request->cancel = std::move(cancel);
  engine_->Attend(*std::move(request),
                  [this, tensors, done = std::move(done)](absl::StatusOr<AttendOutcome> outcome) {
                    done(Take(tensors, std::move(outcome)));
                  });
}

absl::Status Step::Take(const StepTensors& tensors, absl::StatusOr<AttendOutcome> outcome) {
  if (!outcome.ok()) return outcome.status();
  outcome_ = *std::move(outcome);
  const ModelSpec& spec = model().spec;
  absl::Status first;
  for (size_t i = 0; i < parts_.size(); ++i) {
    const JobItem& item = outcome_.job->items[i];
    if (!item.status.ok()) {
      if (first.ok()) first = AtPart(i, item.status);
      continue;
    }
    const AttendResult& result = item.result;
    const float* head = result.out.data();
    for (int64_t t = 0; t < token_count_; ++t) {
      for (int64_t h = 0; h < spec.query_head_count; ++h, head += spec.head_dim) {
        FromFloat(tensors.out_dtype, head, spec.head_dim,
                  tensors.out.At(static_cast<int64_t>(i)) + t * tensors.out.token_stride +
                      h * tensors.out.head_stride);
      }
    }
    if (tensors.lse != nullptr) {
      std::copy(result.lse.begin(), result.lse.end(), tensors.lse + i * result.lse.size());
    }
  }
  return first;
}

}  // namespace spillway

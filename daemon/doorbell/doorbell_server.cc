#include "daemon/doorbell/doorbell_server.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <new>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/convert/decode_step.h"
#include "daemon/convert/tensor.h"
#include "daemon/doorbell/doorbell_memory.h"
#include "daemon/engine/errors.h"
#include "daemon/engine/step.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

// How long a wake that went amiss can leave a thread asleep.
constexpr std::chrono::seconds kLookInterval{1};
// While so many calls are answered a thread that has nothing to do sleeps at once: the
// device has work, and a spin would take a core from it.
constexpr int kAnsweringToSpinMax = 4;

absl::StatusOr<DType> DTypeOf(uint32_t number, const char* field) {
  const std::optional<DType> dtype = FromProto(static_cast<v1::DType>(number));
  if (dtype) return *dtype;
  return InvalidField(field, absl::StrCat("value ", number, " is no float type"));
}

}  // namespace

// One doorbell and its thread. What lies in the region may change at any time: it is
// copied before it is looked at.
class DoorbellServer::Line {
 public:
  Line(const DoorbellServer& server, std::shared_ptr<Region> region)
      : server_(server),
        region_(std::move(region)),
        memory_(*reinterpret_cast<DoorbellMemory*>(region_->bytes.data())),
        data_(region_->bytes.subspan(DoorbellMemory::kDataOffset)),
        thread_([this] { Run(); }) {}
  ~Line() { thread_.join(); }

  // The thread ends, and lets the region go, when it has answered what it is at.
  // region: the doorbell's.
  void Close(const Region& region) {
    closed_ = true;
    reinterpret_cast<DoorbellMemory*>(region.bytes.data())->rung.Wake();
  }
  bool ended() const { return ended_; }

 private:
  void Run() {
    BellWaiter waiter;
    uint32_t seen = 0;
    while (!closed_) {
      const bool may_spin = server_.answering_ < kAnsweringToSpinMax;
      if (!waiter.Await(memory_.rung, seen, BellWaiter::Clock::now() + kLookInterval, may_spin)) {
        continue;
      }
      seen = memory_.rung.number.load(std::memory_order_acquire);
      ++server_.answering_;
      memory_.answer = AnswerTo(memory_.call);
      --server_.answering_;
      memory_.answered.Ring(seen);
    }
    step_.reset();
    inputs_ = {};
    inputs_reservation_ = MemoryReservation();
    region_.reset();
    ended_ = true;
  }

  DoorbellAnswer AnswerTo(DoorbellCall call) {
    DoorbellAnswer answer = {};
    absl::Status status;
    try {
      status = Serve(call, answer);
    } catch (const std::bad_alloc&) {
      status = absl::ResourceExhaustedError("out of memory");
    } catch (const std::exception& error) {
      status = absl::InternalError(error.what());
    }
    if (!status.ok()) {
      answer.code = static_cast<int32_t>(status.code());
      const std::string text = server_.status_->ToRpc(status).SerializeAsString();
      // One that does not fit is told by its code alone.
      if (text.size() <= sizeof(memory_.text)) {
        std::memcpy(memory_.text, text.data(), text.size());
        answer.text_bytes = static_cast<uint32_t>(text.size());
      }
    }
    return answer;
  }

  absl::Status Serve(const DoorbellCall& call, DoorbellAnswer& answer) {
    if (server_.draining_) return absl::UnavailableError("the daemon is shutting down");
    switch (call.kind) {
      case DoorbellCallKind::kBegin:
        return Begin(call, answer.shape);
      case DoorbellCallKind::kAttend:
        return Attend(call);
      case DoorbellCallKind::kResults:
        return Results(call.offset, answer);
      case DoorbellCallKind::kEnd:
        step_.reset();
        return absl::OkStatus();
    }
    return InvalidField("kind",
                        absl::StrCat("value ", static_cast<uint32_t>(call.kind), " is no call"));
  }

  absl::Status Begin(const DoorbellCall& call, StepShape& shape) {
    step_.reset();
    const auto capacity = static_cast<int64_t>(data_.size());
    if (call.byte_count < 0 || call.byte_count > capacity) {
      return InvalidField(
          "byte_count", absl::StrCat("value ", call.byte_count, " is not in [0, ", capacity, "]"));
    }
    const std::string description(reinterpret_cast<const char*>(data_.data()),
                                  static_cast<size_t>(call.byte_count));
    ASSIGN_OR_RETURN(const v1::DecodeStep message, ParseDecodeStep(description));
    ASSIGN_OR_RETURN(step_, StepFromProto(*server_.engine_, message));
    const ModelSpec& spec = step_->model().spec;
    shape_ = {step_->part_count(),   static_cast<int32_t>(step_->token_count()),
              spec.query_head_count, spec.kv_head_count,
              spec.head_dim,         static_cast<uint32_t>(ToProto(spec.dtype))};
    shape = shape_;
    return absl::OkStatus();
  }

  absl::Status CheckStep() const {
    return step_ != nullptr ? absl::OkStatus()
                            : absl::FailedPreconditionError("no step has begun at this doorbell");
  }

  absl::Status Attend(const DoorbellCall& call) {
    RETURN_IF_ERROR(CheckStep());
    results_.reset();
    ASSIGN_OR_RETURN(const DType q_dtype, DTypeOf(call.q_dtype, "q_dtype"));
    ASSIGN_OR_RETURN(const DType out_dtype, DTypeOf(call.out_dtype, "out_dtype"));
    const StepLayout layout(shape_, q_dtype, step_->model().spec.dtype, out_dtype);
    if (layout.byte_count > static_cast<int64_t>(data_.size())) {
      return absl::FailedPreconditionError(
          absl::StrCat("the step's tensors take ", layout.byte_count,
                       " bytes, and the doorbell has ", data_.size()));
    }
    // What is read is copied first: it must not change while it is used.
    if (layout.out_offset > static_cast<int64_t>(inputs_.size())) {
      ASSIGN_OR_RETURN(inputs_reservation_,
                       server_.engine_->budget().Reserve(layout.out_offset, "a step's tensors"));
    }
    inputs_.assign(data_.begin(), data_.begin() + layout.out_offset);
    StepTensors tensors = layout.At(data_.data(), call.wants_lse != 0);
    const StepTensors copied = layout.At(inputs_.data(), false);
    tensors.q = copied.q;
    tensors.k = copied.k;
    tensors.v = copied.v;
    return step_->Attend(call.layer, tensors);
  }

  absl::Status Results(int64_t offset, DoorbellAnswer& answer) {
    RETURN_IF_ERROR(CheckStep());
    if (!results_) {
      results_ = ResultsOf(step_->last(), *server_.status_).SerializeAsString();
    }
    const auto size = static_cast<int64_t>(results_->size());
    if (offset < 0 || offset > size) {
      return InvalidField("offset", absl::StrCat("value ", offset, " is not in [0, ", size, "]"));
    }
    answer.byte_count = std::min(size - offset, static_cast<int64_t>(data_.size()));
    std::memcpy(data_.data(), results_->data() + offset, static_cast<size_t>(answer.byte_count));
    answer.left = size - offset - answer.byte_count;
    return absl::OkStatus();
  }

  const DoorbellServer& server_;
  std::shared_ptr<Region> region_;
  DoorbellMemory& memory_;
  const std::span<std::byte> data_;
  std::atomic<bool> closed_ = false;
  std::atomic<bool> ended_ = false;
  // The thread's alone.
  std::unique_ptr<Step> step_;
  StepShape shape_ = {};
  std::vector<std::byte> inputs_;
  MemoryReservation inputs_reservation_;
  std::optional<std::string> results_;
  // Last: it uses the rest.
  std::thread thread_;
};

DoorbellServer::~DoorbellServer() = default;

absl::StatusOr<std::shared_ptr<Region>> DoorbellServer::Attach(const std::string& session,
                                                               int64_t data_bytes) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() - DoorbellMemory::kDataOffset;
  if (data_bytes < 0 || data_bytes > kMost) {
    return InvalidField("byte_count",
                        absl::StrCat("value ", data_bytes, " is not in [0, ", kMost, "]"));
  }
  {
    std::list<std::shared_ptr<Line>> ended;  // joined without the lock
    const MutexLock lock(mutex_);
    for (auto line = lines_.begin(); line != lines_.end();) {
      const auto next = std::next(line);
      if ((*line)->ended()) ended.splice(ended.end(), lines_, line);
      line = next;
    }
    if (static_cast<int64_t>(lines_.size()) >= kDoorbellCountMax) {
      return WithReason(
          absl::ResourceExhaustedError(absl::StrCat("the daemon answers ", kDoorbellCountMax,
                                                    " doorbells, the most there are")),
          "DOORBELL_COUNT_EXHAUSTED");
    }
  }
  const int64_t bytes =
      DoorbellMemory::kDataOffset + std::max(data_bytes, DoorbellMemory::kDataBytesMin);
  return regions_->Attach(session, bytes, [this](const std::shared_ptr<Region>& region) {
    auto line = std::make_shared<Line>(*this, region);
    region->detached = [line, region] { line->Close(*region); };
    const MutexLock lock(mutex_);
    lines_.push_back(std::move(line));
  });
}

}  // namespace spillway

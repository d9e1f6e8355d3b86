#include "services/doorbell/doorbell_server.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <new>
#include <optional>
#include <span>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/errors.h"
#include "engine/step.h"
#include "engine/stream_decoder.h"
#include "host/base/status_macros.h"
#include "services/convert/attend.h"
#include "services/convert/decode_step.h"
#include "services/convert/tensor.h"
#include "services/doorbell/doorbell_memory.h"

namespace spillway {
namespace {

// How long a thread can sleep at most if a wake-up is lost.
constexpr std::chrono::seconds kLookInterval{1};
// While so many calls are being served, a waiting thread sleeps at once: the device has work, and
// spinning would take a core from it.
constexpr int kAnsweringToSpinMax = 4;

// A decoder's thread spins longer, because the model's own kernels run between two layers.
constexpr std::chrono::microseconds kDecoderSpinMax{200};

absl::StatusOr<DType> DTypeOf(uint32_t number, const char* field) {
  const std::optional<DType> dtype = FromProto(static_cast<v1::DType>(number));
  if (dtype) return *dtype;
  return InvalidField(field, absl::StrCat("value ", number, " is no float type"));
}

}  // namespace

// One doorbell and its thread. The contents of the region may change at any time, so they are
// copied before they are checked.
class DoorbellServer::Line {
 public:
  Line(const DoorbellServer& server, Caller caller, std::shared_ptr<Region> region)
      : server_(server),
        caller_(std::move(caller)),
        region_(std::move(region)),
        memory_(*reinterpret_cast<DoorbellMemory*>(region_->bytes.data())),
        data_(region_->bytes.subspan(DoorbellMemory::kDataOffset)),
        thread_([this] { Run(); }) {}
  ~Line() { thread_.join(); }

  // Makes the thread end after its current call and release the region. Does not wait. region: the
  // doorbell's.
  void Close(const Region& region) {
    closed_ = true;
    reinterpret_cast<DoorbellMemory*>(region.bytes.data())->rung.Wake();
  }
  bool ended() const { return ended_; }

 private:
  void Run() {
    uint32_t seen = 0;
    while (!closed_) {
      const bool may_spin = server_.answering_ < kAnsweringToSpinMax;
      if (!waiter_.Await(memory_.rung, seen, BellWaiter::Clock::now() + kLookInterval, may_spin)) {
        continue;
      }
      seen = memory_.rung.number.load(std::memory_order_acquire);
      ++server_.answering_;
      memory_.answer = AnswerTo(memory_.call);
      --server_.answering_;
      memory_.answered.Ring(seen);
    }
    step_.reset();
    CloseDecoder();
    inputs_ = {};
    inputs_reservation_ = MemoryReservation();
    inputs_charge_ = AccountCharge();
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
      const std::string text = server_.status_->ToRpc(status, trace_).SerializeAsString();
      // If the error does not fit, only its code is returned.
      if (text.size() <= sizeof(memory_.text)) {
        std::memcpy(memory_.text, text.data(), text.size());
        answer.text_bytes = static_cast<uint32_t>(text.size());
      }
    }
    return answer;
  }

  absl::Status Serve(const DoorbellCall& call, DoorbellAnswer& answer) {
    if (server_.draining_)
      return absl::UnavailableError("the daemon is draining: it takes no new work");
    RETURN_IF_ERROR(caller_.Check());
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
      case DoorbellCallKind::kOpenDecoder:
        return OpenDecoder(call, answer);
      case DoorbellCallKind::kCloseDecoder:
        CloseDecoder();
        return absl::OkStatus();
      default:
        return ServeDecoder(call, answer);
    }
  }

  // Calls of a decoder that is open.
  absl::Status ServeDecoder(const DoorbellCall& call, DoorbellAnswer& answer) {
    const auto check = [this] {
      return decoder_ != nullptr
                 ? absl::OkStatus()
                 : absl::FailedPreconditionError("no decoder is open at this doorbell");
    };
    switch (call.kind) {
      case DoorbellCallKind::kDecoderNext:
        RETURN_IF_ERROR(check());
        RETURN_IF_ERROR(decoder_->Next(exchange_->stream()));
        answer.version = decoder_->version();
        return absl::OkStatus();
      case DoorbellCallKind::kDecoderAttend:
        RETURN_IF_ERROR(check());
        return AttendOnGpu(call);
      case DoorbellCallKind::kDecoderFinish:
        RETURN_IF_ERROR(check());
        return decoder_->Finish(exchange_->stream());
      case DoorbellCallKind::kDecoderResults:
        RETURN_IF_ERROR(check());
        if (call.offset == 0 || !results_) {
          results_ = ResultsOf(decoder_->ended(call.layer), *server_.status_).SerializeAsString();
        }
        return SendResults(call.offset, answer);
      case DoorbellCallKind::kDecoderSums:
        RETURN_IF_ERROR(check());
        RETURN_IF_ERROR(CheckLayer(call.layer, decoder_->model().spec));
        return Send(decoder_->sums(call.layer), answer);
      default:
        break;
    }
    return InvalidField("kind",
                        absl::StrCat("value ", static_cast<uint32_t>(call.kind), " is no call"));
  }

  // Parses the description in the data. From now on, errors are reported with its trace id.
  absl::StatusOr<v1::DecodeStep> DescriptionOf(const DoorbellCall& call) {
    trace_ = caller_.trace();
    const auto capacity = static_cast<int64_t>(data_.size());
    if (call.byte_count < 0 || call.byte_count > capacity) {
      return InvalidField(
          "byte_count", absl::StrCat("value ", call.byte_count, " is not in [0, ", capacity, "]"));
    }
    const std::string description(reinterpret_cast<const char*>(data_.data()),
                                  static_cast<size_t>(call.byte_count));
    absl::StatusOr<v1::DecodeStep> step = ParseDecodeStep(description);
    if (step.ok()) trace_ = TraceOf(caller_, *step);
    return step;
  }

  absl::Status Begin(const DoorbellCall& call, StepShape& shape) {
    step_.reset();
    CloseDecoder();
    ASSIGN_OR_RETURN(const v1::DecodeStep message, DescriptionOf(call));
    ASSIGN_OR_RETURN(step_, StepFromProto(*server_.engine_, caller_, message));
    shape = shape_ = ShapeOf(*step_);
    return absl::OkStatus();
  }

  absl::Status OpenDecoder(const DoorbellCall& call, DoorbellAnswer& answer) {
    step_.reset();
    CloseDecoder();
    ASSIGN_OR_RETURN(const v1::DecodeStep message, DescriptionOf(call));
    ASSIGN_OR_RETURN(std::unique_ptr<StreamDecoder> decoder,
                     DecoderFromProto(*server_.engine_, caller_, message, call.offset));
    const StepShape shape = ShapeOf(*decoder);
    const StepLayout layout = LargestLayout(shape, decoder->model().spec.dtype);
    // The memory that it shares, and the copy of its inputs.
    AccountCharge charge(account());
    RETURN_IF_ERROR(charge.Add(layout.byte_count + layout.out_offset));
    ASSIGN_OR_RETURN(exchange_, decoder->home().OpenExchange(layout.byte_count, layout.out_offset));
    exchange_charge_ = std::move(charge);
    decoder_ = std::move(decoder);
    waiter_.SetSpinMax(kDecoderSpinMax);
    answer.shape = shape_ = shape;
    const SharedDeviceMemory& shared = exchange_->shared();
    DecoderMemory memory = {};
    memory.byte_count = static_cast<int64_t>(shared.bytes().size());
    const std::string& device = shared.device().info().uuid;
    if (device.size() >= sizeof(memory.device) || shared.handle().size() != sizeof(memory.handle)) {
      CloseDecoder();
      return absl::InternalError("a GPU's UUID, or a handle of its memory, has an unexpected size");
    }
    std::memcpy(memory.device, device.data(), device.size());
    std::memcpy(memory.handle, shared.handle().data(), sizeof(memory.handle));
    return Send(memory, answer);
  }

  void CloseDecoder() {
    // First, because it ends its step on the exchange's stream.
    decoder_.reset();
    exchange_.reset();
    exchange_charge_ = AccountCharge();
    results_.reset();
    waiter_.SetSpinMax(BellWaiter::kSpinMax);
  }

  absl::Status AttendOnGpu(const DoorbellCall& call) {
    ASSIGN_OR_RETURN(const DType q_dtype, DTypeOf(call.q_dtype, "q_dtype"));
    ASSIGN_OR_RETURN(const DType out_dtype, DTypeOf(call.out_dtype, "out_dtype"));
    // At most as large as LargestLayout(), for which the memory was allocated.
    const StepLayout layout(shape_, q_dtype, decoder_->model().spec.dtype, out_dtype);
    // Inputs are copied first, so that the client cannot change them while they are used.
    RETURN_IF_ERROR(exchange_->TakeInputs(layout.out_offset));
    StepTensors tensors = layout.At(exchange_->shared().bytes().data(), call.wants_lse != 0);
    const StepTensors copied = layout.At(exchange_->inputs(), false);
    tensors.q = copied.q;
    tensors.k = copied.k;
    tensors.v = copied.v;
    RETURN_IF_ERROR(decoder_->Attend(call.layer, tensors, exchange_->stream()));
    return exchange_->Await();
  }

  // Answers with a value in the data.
  template <typename T>
  absl::Status Send(const T& value, DoorbellAnswer& answer) {
    static_assert(std::is_trivially_copyable_v<T> &&
                  sizeof(T) <= static_cast<size_t>(DoorbellMemory::kDataBytesMin));
    std::memcpy(data_.data(), &value, sizeof(value));
    answer.byte_count = static_cast<int64_t>(sizeof(value));
    return absl::OkStatus();
  }

  // Charged with what the doorbell holds beside its region.
  std::shared_ptr<Account> account() const {
    return server_.engine_->accounts().Of(caller_.name_space());
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
    // Inputs are copied first, so that the client cannot change them while they are used.
    if (layout.out_offset > static_cast<int64_t>(inputs_.size())) {
      AccountCharge charge(account());
      RETURN_IF_ERROR(charge.Add(layout.out_offset));
      inputs_charge_ = std::move(charge);
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
    return SendResults(offset, answer);
  }

  absl::Status SendResults(int64_t offset, DoorbellAnswer& answer) {
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
  const Caller caller_;
  std::shared_ptr<Region> region_;
  DoorbellMemory& memory_;
  const std::span<std::byte> data_;
  std::atomic<bool> closed_ = false;
  std::atomic<bool> ended_ = false;
  // Used by the thread only.
  BellWaiter waiter_;
  std::string trace_ = caller_.trace();  // of the step or decoder that was described last
  std::unique_ptr<Step> step_;
  StepShape shape_ = {};  // of the open step or decoder
  std::unique_ptr<DeviceExchange> exchange_;
  std::unique_ptr<StreamDecoder> decoder_;
  std::vector<std::byte> inputs_;
  MemoryReservation inputs_reservation_;
  AccountCharge exchange_charge_, inputs_charge_;
  std::optional<std::string> results_;
  // Last, because it uses the members above.
  std::thread thread_;
};

DoorbellServer::~DoorbellServer() = default;

absl::StatusOr<std::shared_ptr<Region>> DoorbellServer::Attach(const Caller& caller,
                                                               const std::string& session,
                                                               int64_t data_bytes) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() - DoorbellMemory::kDataOffset;
  if (data_bytes < 0 || data_bytes > kMost) {
    return InvalidField("byte_count",
                        absl::StrCat("value ", data_bytes, " is not in [0, ", kMost, "]"));
  }
  {
    std::list<std::shared_ptr<Line>> ended;  // joined after the lock is released
    const MutexLock lock(mutex_);
    for (auto line = lines_.begin(); line != lines_.end();) {
      const auto next = std::next(line);
      if ((*line)->ended()) ended.splice(ended.end(), lines_, line);
      line = next;
    }
    if (static_cast<int64_t>(lines_.size()) >= kDoorbellCountMax) {
      return WithReason(
          absl::ResourceExhaustedError(absl::StrCat("the daemon has ", kDoorbellCountMax,
                                                    " doorbells already, the most that it serves")),
          Reason::kDoorbellCountExhausted);
    }
  }
  const int64_t bytes =
      DoorbellMemory::kDataOffset + std::max(data_bytes, DoorbellMemory::kDataBytesMin);
  const auto attached = [this, &caller](const std::shared_ptr<Region>& region) {
    auto line = std::make_shared<Line>(*this, caller, region);
    region->detached = [line, region] { line->Close(*region); };
    const MutexLock lock(mutex_);
    lines_.push_back(std::move(line));
  };
  try {
    return regions_->Attach(caller, session, bytes, attached);
  } catch (const std::system_error& error) {
    return WithReason(absl::ResourceExhaustedError(absl::StrCat(
                          "no thread could be started for a doorbell: ", error.what())),
                      Reason::kThreadsExhausted);
  }
}

}  // namespace spillway

#include "engine/stream_decoder.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/checks.h"
#include "engine/errors.h"
#include "host/base/limits.h"
#include "host/base/parallel.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

// Pending steps, at most.
constexpr int kPendingMax = 2;
// Steps of a decoder before it works ahead. While prompts of other requests come, a runner may open
// a decoder for two or three steps, and then closes it.
constexpr int64_t kStepsBefore = 2;
// (sequence, layer) pairs that the thread which works ahead serves alone. For so many it takes 1 to
// 2 ms, which is less than the step takes, and to wake other threads would take theirs.
constexpr int64_t kPairsAlone = 512;

}  // namespace

absl::StatusOr<std::unique_ptr<StreamDecoder>> StreamDecoder::Create(Engine* engine,
                                                                     std::vector<Part> parts,
                                                                     int64_t token_count,
                                                                     int64_t token_count_max) {
  RETURN_IF_ERROR(CheckStep(parts.size(), token_count));
  OneModel together;
  std::vector<std::shared_ptr<Sequence>> sequences;
  for (size_t i = 0; i < parts.size(); ++i) {
    RETURN_IF_ERROR(together.Add(*parts[i].sequence, absl::StrCat("parts[", i, "].sequence")));
    sequences.push_back(parts[i].sequence);
  }
  if (token_count_max < token_count || token_count_max > kTokenCountMax) {
    return InvalidField("token_count_max", absl::StrCat("value ", token_count_max, " is not in [",
                                                        token_count, ", ", kTokenCountMax, "]"));
  }
  std::unique_ptr<StreamDecoder> decoder(
      new StreamDecoder(engine, std::move(parts), token_count, token_count_max));
  ASSIGN_OR_RETURN(decoder->hold_, engine->Hold(std::move(sequences)));
  StreamStepOptions options;
  options.token_count = token_count;
  options.token_count_max = token_count_max;
  for (const Part& part : decoder->parts_) {
    RETURN_IF_ERROR(part.sequence->CheckOpen());
    RETURN_IF_ERROR(CheckGeneration(part.generation, *part.sequence));
    if (const int64_t length = part.sequence->token_count(); part.start != length) {
      return absl::OutOfRangeError(absl::StrCat(part.sequence->name, " has ", length,
                                                " tokens, but the step starts at token ",
                                                part.start));
    }
    options.parts.push_back({part.sequence->device.get(), &part.sequence->rows, part.policy});
  }
  ASSIGN_OR_RETURN(decoder->step_, engine->device_->CreateStreamStep(*decoder->model().device(),
                                                                     std::move(options)));
  return decoder;
}

StreamDecoder::~StreamDecoder() {
  ahead_.Cancel();
  if (step_ != nullptr && step_->pending_count() > 0) Finish(last_stream_).IgnoreError();
  is_prepared_ |= is_half_done_;
  DropAhead();
  step_.reset();
  if (!starts_.empty()) {
    // The device failed: tokens that are not known to be written are dropped.
    for (size_t i = 0; i < parts_.size(); ++i) Truncate(i, starts_.front()[i]);
  }
  if (hold_ != nullptr) engine_->Release(*hold_);
}

absl::Status StreamDecoder::CheckLayers() const {
  for (const Part& part : parts_) {
    for (const LayerRows& rows : part.sequence->rows) {
      if (rows.token_count() == part.sequence->rows.front().token_count()) continue;
      return absl::FailedPreconditionError(
          absl::StrCat(part.sequence->name, " has layers with ",
                       part.sequence->rows.front().token_count(), " and with ", rows.token_count(),
                       " tokens: a decoder needs the same number in all layers"));
    }
  }
  return absl::OkStatus();
}

size_t StreamDecoder::Shares() const {
  return ShareCount(part_count() * int64_t{model().spec.layer_count}, home().info().thread_count);
}

template <typename F>
void StreamDecoder::InParallel(F f) const {
  InShares(Shares(), parts_.size(), f);
}

absl::Status StreamDecoder::Prepare() {
  std::vector<int> layers(model().spec.layer_count);
  std::iota(layers.begin(), layers.end(), 0);
  std::vector<absl::Status> prepared(parts_.size());
  InParallel([&](size_t i) {
    prepared[i] = engine_->PrepareAppend(*parts_[i].sequence, layers, token_count_);
  });
  // Forks of one sequence, prepared at once, may each have copied a page that the last of them need
  // not copy. One after the other, they take no more than they need.
  for (size_t i = 0; i < parts_.size() && Shares() > 1; ++i) {
    if (prepared[i].ok()) continue;
    prepared[i] = engine_->PrepareAppend(*parts_[i].sequence, layers, token_count_);
  }
  const auto failed = std::ranges::find_if_not(prepared, &absl::Status::ok);
  if (failed == prepared.end()) return absl::OkStatus();
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (prepared[i].ok()) Truncate(i, parts_[i].sequence->token_count());
  }
  return *failed;
}

bool StreamDecoder::HasRoom() const {
  return std::ranges::all_of(parts_, [&](const Part& part) {
    return part.sequence->token_count() + token_count_ <= token_count_max_;
  });
}

void StreamDecoder::WorkAhead() {
  try {
    TryToWorkAhead();
  } catch (const std::exception&) {
    // Lack of memory, which the caller's thread can report when it does the work.
    is_half_done_ = true;
  }
}

void StreamDecoder::MendAhead() {
  if (!is_half_done_) return;
  is_prepared_ = true;
  is_half_done_ = false;
  DropAhead();
}

void StreamDecoder::TryToWorkAhead() {
  std::optional<SerialScope> alone;
  if (part_count() * int64_t{model().spec.layer_count} <= kPairsAlone) alone.emplace();
  if (!is_prepared_ && HasRoom() && Prepare().ok()) {
    is_prepared_ = true;
    is_half_done_ = !step_->PlanAhead().ok();
  }
  if (step_->pending_count() < kPendingMax) return;
  const absl::StatusOr<StreamStep::Outcome>* const ended = step_->Collect();
  if (ended == nullptr || !ended->ok()) return;
  const StreamStep::Outcome& outcome = **ended;
  if (outcome.ran && std::ranges::all_of(outcome.parts, &absl::Status::ok)) {
    counted_ = Count(outcome);
  }
}

void StreamDecoder::DropAhead() {
  if (!std::exchange(is_prepared_, false)) return;
  step_->DropPlan();
  for (size_t i = 0; i < parts_.size(); ++i) Truncate(i, parts_[i].sequence->token_count());
}

absl::Status StreamDecoder::Next(void* stream) {
  RETURN_IF_ERROR(failure_);
  RETURN_IF_ERROR(step_->Conclude(stream));
  ahead_.Wait();
  MendAhead();
  last_stream_ = stream;
  if (step_->pending_count() == kPendingMax) RETURN_IF_ERROR(Settle());
  RETURN_IF_ERROR(CheckLayers());
  if (!is_prepared_) RETURN_IF_ERROR(Prepare());
  std::vector<int64_t> starts;
  for (const Part& part : parts_) {
    starts.push_back(part.sequence->token_count());
    engine_->Renew(*part.sequence);
  }
  is_prepared_ = true;
  // Until it returns: an exception leaves pages without a plan.
  is_half_done_ = true;
  const absl::Status status = step_->Announce(stream);
  is_half_done_ = false;
  if (!status.ok()) {
    // A plan that it has not taken serves the next call.
    if (!step_->is_planned()) DropAhead();
    return status;
  }
  is_prepared_ = false;
  starts_.push_back(std::move(starts));
  has_ended_ = false;
  if (++announced_count_ >= kStepsBefore && step_->works_ahead()) {
    ahead_.Start([this] { WorkAhead(); });
  }
  return absl::OkStatus();
}

absl::Status StreamDecoder::Attend(int layer, const StepTensors& tensors, void* stream) {
  if (layer < 0 || layer >= model().spec.layer_count) {
    return InvalidField(
        "layer", absl::StrCat("value ", layer, " is not in [0, ", model().spec.layer_count, ")"));
  }
  RETURN_IF_ERROR(failure_);
  return step_->Attend(layer, tensors, stream);
}

absl::Status StreamDecoder::Run(StepGraph& graph, void* stream) {
  RETURN_IF_ERROR(failure_);
  return step_->Run(graph, stream);
}

absl::Status StreamDecoder::Finish(void* stream) {
  RETURN_IF_ERROR(failure_);
  RETURN_IF_ERROR(step_->Conclude(stream));
  ahead_.Cancel();
  MendAhead();
  while (step_->pending_count() > 0) RETURN_IF_ERROR(Settle());
  return absl::OkStatus();
}

absl::Status StreamDecoder::Settle() {
  const absl::StatusOr<StreamStep::Outcome> settled = step_->Settle();
  if (!settled.ok()) return Fail(settled.status());
  const StreamStep::Outcome& outcome = *settled;
  if (outcome.ran) {
    if (!counted_.has_value()) counted_ = Count(outcome);
    for (size_t layer = 0; layer < sums_.size(); ++layer) sums_[layer].Add((*counted_)[layer]);
    counted_.reset();
  }
  const std::vector<int64_t> starts = std::move(starts_.front());
  starts_.pop_front();
  has_ended_ = true;
  absl::Status first;
  for (size_t i = 0; i < parts_.size() && outcome.ran; ++i) {
    engine_->NoteEnded(*parts_[i].sequence, outcome.parts[i]);
    if (outcome.parts[i].ok() || !first.ok()) continue;
    const std::string& name = parts_[i].sequence->name;
    first = WithMessage(outcome.parts[i], absl::StrCat(name, ": ", outcome.parts[i].message()));
  }
  if (outcome.ran && first.ok()) return first;
  // Later steps attended to tokens that are truncated now.
  bool later_ran = false;
  while (step_->pending_count() > 0) {
    const absl::StatusOr<StreamStep::Outcome> later = step_->Settle();
    if (!later.ok()) {
      std::vector<int64_t>& kept = starts_.emplace_front(starts);
      for (size_t i = 0; i < parts_.size(); ++i) {
        if (outcome.ran && outcome.parts[i].ok()) kept[i] += token_count_;
      }
      return Fail(later.status());
    }
    starts_.pop_front();
    later_ran |= later->ran;
  }
  DropAhead();
  for (size_t i = 0; i < parts_.size(); ++i) {
    const bool kept = outcome.ran && outcome.parts[i].ok();
    Truncate(i, kept ? starts[i] + token_count_ : starts[i]);
  }
  if (!outcome.ran && later_ran) {
    return absl::FailedPreconditionError(
        "none of the layers of a step were attended, but layers of the next step were");
  }
  return first;
}

absl::Status StreamDecoder::Fail(const absl::Status& status) {
  failure_ = status;
  has_ended_ = false;
  engine_->CheckDevices();
  return status;
}

void StreamDecoder::Truncate(size_t part, int64_t token_count) {
  Sequence& sequence = *parts_[part].sequence;
  for (LayerRows& rows : sequence.rows) {
    rows.Rollback();
    if (rows.token_count() > token_count) rows.Truncate(token_count);
  }
  engine_->device_->TruncateSequence(*sequence.model->device(), *sequence.device, token_count);
  sequence.Publish();
}

std::vector<AttendSums> StreamDecoder::Count(const StreamStep::Outcome& outcome) {
  std::vector<std::vector<AttendSums>> by_part(parts_.size());
  InParallel([&](size_t i) {
    if (outcome.parts[i].ok()) Count(i, starts_.front()[i] + token_count_, by_part[i]);
  });
  // In the order of the parts, on which sums of floats depend.
  std::vector<AttendSums> sums(sums_.size());
  for (const std::vector<AttendSums>& of_part : by_part) {
    for (size_t layer = 0; layer < of_part.size(); ++layer) sums[layer].Add(of_part[layer]);
  }
  return sums;
}

void StreamDecoder::Count(size_t part, int64_t token_count, std::vector<AttendSums>& sums) {
  Sequence& sequence = *parts_[part].sequence;
  const ModelSpec& spec = model().spec;
  for (LayerRows& rows : sequence.rows) {
    if (step_->keeps_lengths()) {
      rows.KeepWritten(token_count);
    } else {
      rows.Keep(token_count);
    }
  }
  engine_->CountAppend(sequence, token_count_ * spec.kv_head_count * spec.layer_count);
  sums.reserve(static_cast<size_t>(spec.layer_count));
  AttendSums all;
  double time_us = 0;
  for (int layer = 0; layer < spec.layer_count; ++layer) {
    const Job& job = step_->settled(layer);
    // A layer that attends to all rows reports no time.
    if (part == 0 && job.device_time_us > 0) {
      engine_->counters_.attend_device.Note(job.device_time_us / 1e6);
      engine_->counters_.attend_stages.Note(job.stages);
    }
    AttendSums& own = sums.emplace_back();
    own.Add(job.items[part], spec.group_count());
    all.Add(own);
    time_us += ItemTimeUs(job);
  }
  engine_->CountAttends(all, time_us, sequence);
  sequence.Publish();
}

const Job* StreamDecoder::ended(int layer) const {
  return has_ended_ && layer >= 0 && layer < model().spec.layer_count ? &step_->settled(layer)
                                                                      : nullptr;
}

}  // namespace spillway

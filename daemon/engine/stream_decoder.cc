#include "daemon/engine/stream_decoder.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/engine/checks.h"
#include "daemon/engine/errors.h"
#include "host/base/limits.h"
#include "host/base/parallel.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

// Pending steps, at most.
constexpr int kPendingMax = 2;

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
  std::unique_ptr<StreamDecoder> decoder(new StreamDecoder(engine, std::move(parts), token_count));
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
  if (step_ != nullptr && step_->pending_count() > 0) Finish(last_stream_).IgnoreError();
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

absl::Status StreamDecoder::Next(void* stream) {
  RETURN_IF_ERROR(failure_);
  RETURN_IF_ERROR(step_->Conclude(stream));
  last_stream_ = stream;
  if (step_->pending_count() == kPendingMax) RETURN_IF_ERROR(Settle());
  RETURN_IF_ERROR(CheckLayers());
  RETURN_IF_ERROR(Prepare());
  std::vector<int64_t> starts;
  for (const Part& part : parts_) {
    starts.push_back(part.sequence->token_count());
    engine_->Renew(*part.sequence);
  }
  if (absl::Status status = step_->Announce(stream); !status.ok()) {
    for (size_t i = 0; i < parts_.size(); ++i) Truncate(i, starts[i]);
    return status;
  }
  starts_.push_back(std::move(starts));
  has_ended_ = false;
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
  while (step_->pending_count() > 0) RETURN_IF_ERROR(Settle());
  return absl::OkStatus();
}

absl::Status StreamDecoder::Settle() {
  const absl::StatusOr<StreamStep::Outcome> settled = step_->Settle();
  if (!settled.ok()) return Fail(settled.status());
  const StreamStep::Outcome& outcome = *settled;
  const std::vector<int64_t> starts = std::move(starts_.front());
  starts_.pop_front();
  has_ended_ = true;
  absl::Status first;
  std::vector<std::vector<AttendSums>> sums(parts_.size());
  if (outcome.ran) {
    InParallel([&](size_t i) {
      if (outcome.parts[i].ok()) Count(i, starts[i] + token_count_, sums[i]);
    });
  }
  for (size_t i = 0; i < parts_.size() && outcome.ran; ++i) {
    engine_->NoteEnded(*parts_[i].sequence, outcome.parts[i]);
    // In the order of the parts, on which sums of floats depend.
    for (size_t layer = 0; layer < sums[i].size(); ++layer) sums_[layer].Add(sums[i][layer]);
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
    own.Add(job.items[part], spec.kv_head_count);
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

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "engine/step.h"
#include "host/base/status_macros.h"
#include "lib/deadline.h"
#include "lib/doorbell_step.h"
#include "lib/embedded_steps.h"
#include "lib/interface.h"
#include "lib/message_step.h"
#include "lib/step.h"
#include "lib/step_sums.h"
#include "services/convert/decode_step.h"
#include "services/embedded.h"
#include "spillway.h"

struct spillway_step {
  std::unique_ptr<spillway::ClientStep> step;
  int64_t token_count;  // new tokens of each sequence
  int carrier;
  std::string reason;  // why no better carrier is used
  std::string results = {};

  // Returns the code for the status that f returns: SPILLWAY_UNANSWERED for nullopt, 0, or the
  // error's code. Stores an error as the last one of this thread.
  template <typename F>
  int Code(F f) const {
    std::optional<absl::Status> status;
    const absl::Status thrown = spillway::Caught([&] {
      status = f();
      return absl::OkStatus();
    });
    if (!thrown.ok()) status = thrown;
    if (!status.has_value()) return SPILLWAY_UNANSWERED;
    return status->ok() ? 0 : spillway::SetError(*status, step->DetailsOf(*status));
  }
  // nullopt: the request was sent.
  std::optional<absl::Status> Ask(int layer, const spillway_step_tensors& tensors) const {
    const absl::StatusOr<spillway::StepTensors> places = spillway::TensorsOf(tensors);
    if (!places.ok()) return places.status();
    absl::Status asked = step->Ask(layer, *places);
    if (!asked.ok()) return asked;
    return std::nullopt;
  }
  std::optional<absl::Status> Await(const spillway_step_tensors& tensors,
                                    spillway::BellWaiter::Clock::time_point deadline) const {
    const absl::StatusOr<spillway::StepTensors> places = spillway::TensorsOf(tensors);
    if (!places.ok()) return places.status();
    return step->Await(*places, deadline);
  }
};

namespace {

// Begins a step by one of the carriers. reason: why no better one is used.
absl::StatusOr<std::unique_ptr<spillway_step>> BeginBy(int carrier, spillway_channel& channel,
                                                       const spillway::StepDescription& description,
                                                       std::string reason, std::string& trace) {
  std::unique_ptr<spillway::ClientStep> step;
  if (carrier == SPILLWAY_IN_PLACE) {
    ASSIGN_OR_RETURN(std::unique_ptr<spillway::Step> begun,
                     channel.embedded->BeginStep(description.message, trace));
    RETURN_IF_ERROR(spillway::CheckShape(description.shape, spillway::ShapeOf(*begun)));
    step = std::make_unique<spillway::EmbeddedStep>(channel.embedded, std::move(begun), trace);
  } else if (carrier == SPILLWAY_DOORBELL) {
    ASSIGN_OR_RETURN(step, spillway::DoorbellStep::Begin(channel.session, description));
  } else {
    ASSIGN_OR_RETURN(step, spillway::MessageStep::Begin(channel.channel, channel.client_id,
                                                        channel.WhenUnavailable(), description));
  }
  return std::unique_ptr<spillway_step>(new spillway_step{
      std::move(step), description.shape.token_count, carrier, std::move(reason)});
}

// The same by the best carrier that is possible.
absl::StatusOr<std::unique_ptr<spillway_step>> BeginByBest(
    spillway_channel& channel, const spillway::StepDescription& description, std::string& trace) {
  if (channel.embedded != nullptr) {
    return BeginBy(SPILLWAY_IN_PLACE, channel, description, "", trace);
  }
  auto begun = BeginBy(SPILLWAY_DOORBELL, channel, description,
                       "the engine is in a daemon, and not in this process", trace);
  if (!absl::IsUnimplemented(begun.status())) return begun;
  return BeginBy(SPILLWAY_MESSAGES, channel, description, std::string(begun.status().message()),
                 trace);
}

// The part of the tensors `all` that belongs to a share.
spillway_step_tensors TensorsOf(const spillway_step_share& share,
                                const spillway_step_tensors& all) {
  const auto own = [&share](spillway_tensor tensor, int64_t head_first) {
    if (tensor.data == nullptr) return tensor;
    tensor.data = static_cast<std::byte*>(tensor.data) +
                  share.sequence_first * tensor.sequence_stride + head_first * tensor.head_stride;
    tensor.sequence_stride *= share.sequence_every;
    return tensor;
  };
  spillway_step_tensors tensors = all;
  tensors.q = own(all.q, share.query_head_first);
  tensors.k = own(all.k, share.kv_head_first);
  tensors.v = own(all.v, share.kv_head_first);
  tensors.out = own(all.out, share.query_head_first);
  tensors.lse = share.lse;
  return tensors;
}

// Waits for the steps whose code is SPILLWAY_UNANSWERED. Returns as spillway_steps_attend.
int AwaitAll(std::span<spillway_step_share> shares, const spillway_step_tensors& all,
             spillway::BellWaiter::Clock::time_point deadline) {
  int code = 0;
  for (spillway_step_share& share : shares) {
    if (share.code == SPILLWAY_UNANSWERED) {
      share.code =
          share.step->Code([&] { return share.step->Await(TensorsOf(share, all), deadline); });
    }
    if (code == 0 || share.code == SPILLWAY_UNANSWERED) code = share.code;
  }
  return code;
}

}  // namespace

spillway_step* spillway_step_begin(spillway_channel* channel, const void* description, size_t size,
                                   const spillway_step_shape* shape, int carrier) {
  spillway::Embedded* const engine = channel->embedded.get();
  std::string trace;
  return spillway::OrNull<spillway_step>(
      [&]() -> absl::StatusOr<spillway_step*> {
        const std::string_view text(static_cast<const char*>(description), size);
        if (shape == nullptr) return absl::InvalidArgumentError("shape: is NULL");
        if (carrier < SPILLWAY_BEST || carrier > SPILLWAY_MESSAGES) {
          return absl::InvalidArgumentError(
              absl::StrCat("carrier ", carrier,
                           " is not one of SPILLWAY_BEST, SPILLWAY_IN_PLACE, "
                           "SPILLWAY_DOORBELL and SPILLWAY_MESSAGES"));
        }
        if (carrier != SPILLWAY_BEST && (carrier == SPILLWAY_IN_PLACE) != (engine != nullptr)) {
          return absl::UnimplementedError(
              engine != nullptr
                  ? "the engine is in this process: only SPILLWAY_IN_PLACE is possible"
                  : "the engine is in a daemon: SPILLWAY_IN_PLACE is not possible");
        }
        ASSIGN_OR_RETURN(
            const spillway::StepDescription described,
            spillway::DescriptionOf(text, shape->query_head_count, shape->kv_head_count,
                                    shape->head_dim, shape->row_dtype));
        const char* const reason =
            carrier == SPILLWAY_IN_PLACE ? "" : "the caller has asked for it";
        ASSIGN_OR_RETURN(std::unique_ptr<spillway_step> step,
                         carrier == SPILLWAY_BEST
                             ? BeginByBest(*channel, described, trace)
                             : BeginBy(carrier, *channel, described, reason, trace));
        return step.release();
      },
      engine, trace);
}

int spillway_step_carrier(const spillway_step* step, const char** reason) {
  if (reason != nullptr) *reason = step->reason.c_str();
  return step->carrier;
}

int spillway_step_attend(spillway_step* step, int layer, const spillway_step_tensors* tensors,
                         double timeout_seconds) {
  const auto deadline = spillway::After(timeout_seconds);
  return step->Code([&] {
    std::optional<absl::Status> failed = step->Ask(layer, *tensors);
    return failed.has_value() ? failed : step->Await(*tensors, deadline);
  });
}

int spillway_step_await(spillway_step* step, const spillway_step_tensors* tensors,
                        double timeout_seconds) {
  const auto deadline = spillway::After(timeout_seconds);
  return step->Code([&] { return step->Await(*tensors, deadline); });
}

int spillway_steps_attend(spillway_step_share* shares, size_t count, int layer,
                          const spillway_step_tensors* all, double timeout_seconds) {
  const auto deadline = spillway::After(timeout_seconds);
  for (spillway_step_share& share : std::span(shares, count)) {
    share.code = share.step->Code(
        [&] { return share.step->Ask(layer - share.layer_first, TensorsOf(share, *all)); });
  }
  return AwaitAll({shares, count}, *all, deadline);
}

int spillway_steps_await(spillway_step_share* shares, size_t count,
                         const spillway_step_tensors* all, double timeout_seconds) {
  return AwaitAll({shares, count}, *all, spillway::After(timeout_seconds));
}

int spillway_step_results(spillway_step* step, const void** message, size_t* size) {
  step->results.clear();
  const int code = step->Code([&]() -> absl::Status {
    ASSIGN_OR_RETURN(const spillway::v1::AttendResponse results, step->step->Results());
    step->results = results.SerializeAsString();
    return absl::OkStatus();
  });
  *message = step->results.data();
  *size = step->results.size();
  return code;
}

int spillway_step_sums_of(spillway_step* step, spillway_sums* sums) {
  *sums = {};
  return step->Code([&]() -> absl::Status {
    ASSIGN_OR_RETURN(const spillway::v1::AttendResponse results, step->step->Results());
    *sums = spillway::SumsOf(results, step->token_count);
    return absl::OkStatus();
  });
}

void spillway_step_end(spillway_step* step) { delete step; }

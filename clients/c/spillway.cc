#include "spillway.h"

#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "clients/c/call.h"
#include "clients/c/daemon_session.h"
#include "clients/c/deadline.h"
#include "clients/c/decoder.h"
#include "clients/c/doorbell_decoder.h"
#include "clients/c/doorbell_step.h"
#include "clients/c/embedded_steps.h"
#include "clients/c/gpu.h"
#include "clients/c/message_step.h"
#include "clients/c/step.h"
#include "clients/c/step_sums.h"
#include "daemon/convert/decode_step.h"
#include "daemon/convert/trace.h"
#include "daemon/engine/step.h"
#include "daemon/engine/stream_decoder.h"
#include "daemon/server/embedded.h"
#include "grpcpp/channel.h"
#include "host/base/status_macros.h"
#include "spillway/access.h"
#include "spillway/presence.h"

namespace {

// The last failure in this thread.
thread_local absl::Status last_error;
thread_local std::string last_details;  // a serialised google.rpc.Status, or empty

// Stores an error and its serialised google.rpc.Status, if it has one. Returns the error's code.
int SetError(const absl::Status& status, std::string details) {
  last_details = std::move(details);
  last_error = status;
  return static_cast<int>(status.code());
}

// The same, with the details from `engine`, or from a daemon if `engine` is null. trace: the trace
// id of the request, for an engine's log.
int SetError(const absl::Status& status, const spillway::Embedded* engine = nullptr,
             std::string_view trace = {}) {
  return SetError(status, engine != nullptr ? engine->DetailsOf(status, trace)
                                            : spillway::DaemonDetails(status));
}

// Returns 0, or stores an error and returns its code.
int CodeOf(const absl::Status& status) { return status.ok() ? 0 : SetError(status); }

// Returns the status, with or without a value, that f returns. Turns an exception into a status.
template <typename F>
auto Caught(F f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("out of memory");
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  }
}

// Returns what f makes. If f fails, stores the error and returns nullptr. trace: set by f.
template <typename T, typename F>
T* OrNull(F f, const spillway::Embedded* engine = nullptr, const std::string& trace = {}) {
  const absl::StatusOr<T*> made = Caught([&]() -> absl::StatusOr<T*> { return f(); });
  if (made.ok()) return *made;
  SetError(made.status(), engine, trace);
  return nullptr;
}

// number: of spillway.v1.DType. nullopt: unknown.
std::optional<spillway::DType> DTypeOf(int32_t number) {
  switch (number) {
    case SPILLWAY_F32:
      return spillway::DType::kF32;
    case SPILLWAY_F16:
      return spillway::DType::kF16;
    case SPILLWAY_BF16:
      return spillway::DType::kBF16;
    default:
      return std::nullopt;
  }
}

template <typename Byte>
spillway::StepPlace<Byte> PlaceOf(const spillway_tensor& tensor) {
  return {static_cast<Byte*>(tensor.data), tensor.sequence_stride, tensor.token_stride,
          tensor.head_stride};
}

absl::StatusOr<spillway::StepTensors> TensorsOf(const spillway_step_tensors& from) {
  const std::optional<spillway::DType> q_dtype = DTypeOf(from.q_dtype);
  const std::optional<spillway::DType> out_dtype = DTypeOf(from.out_dtype);
  if (!q_dtype || !out_dtype || (*out_dtype != *q_dtype && *out_dtype != spillway::DType::kF32)) {
    return absl::InvalidArgumentError(
        absl::StrCat("q_dtype ", from.q_dtype, ", out_dtype ", from.out_dtype,
                     ": q_dtype must be SPILLWAY_F32, SPILLWAY_F16 or SPILLWAY_BF16, and out_dtype "
                     "the same or SPILLWAY_F32"));
  }
  for (const auto& [data, name] : {std::pair(from.q.data, "q"), std::pair(from.k.data, "k"),
                                   std::pair(from.v.data, "v"), std::pair(from.out.data, "out")}) {
    if (data == nullptr) return absl::InvalidArgumentError(absl::StrCat(name, ": is NULL"));
  }
  spillway::StepTensors tensors;
  tensors.q_dtype = *q_dtype;
  tensors.q = PlaceOf<const std::byte>(from.q);
  tensors.k = PlaceOf<const std::byte>(from.k);
  tensors.v = PlaceOf<const std::byte>(from.v);
  tensors.out_dtype = *out_dtype;
  tensors.out = PlaceOf<std::byte>(from.out);
  tensors.lse = from.lse;
  return tensors;
}

}  // namespace

struct spillway_channel {
  // Declared first, so that it is destroyed last.
  std::shared_ptr<spillway::Embedded> embedded;  // null for a daemon
  std::shared_ptr<grpc::Channel> channel;
  std::string client_id;                             // empty: embedded
  std::shared_ptr<spillway::DaemonSession> session;  // null: embedded
  // Null: embedded, or the caller keeps the Connect stream open.
  std::unique_ptr<spillway::PresenceKeeper> presence;
};

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
    const absl::Status thrown = Caught([&] {
      status = f();
      return absl::OkStatus();
    });
    if (!thrown.ok()) status = thrown;
    if (!status.has_value()) return SPILLWAY_UNANSWERED;
    return status->ok() ? 0 : SetError(*status, step->DetailsOf(*status));
  }
  // nullopt: the request was sent.
  std::optional<absl::Status> Ask(int layer, const spillway_step_tensors& tensors) const {
    const absl::StatusOr<spillway::StepTensors> places = TensorsOf(tensors);
    if (!places.ok()) return places.status();
    absl::Status asked = step->Ask(layer, *places);
    if (!asked.ok()) return asked;
    return std::nullopt;
  }
  std::optional<absl::Status> Await(const spillway_step_tensors& tensors,
                                    spillway::BellWaiter::Clock::time_point deadline) const {
    const absl::StatusOr<spillway::StepTensors> places = TensorsOf(tensors);
    if (!places.ok()) return places.status();
    return step->Await(*places, deadline);
  }
};

struct spillway_gpu_region {
  std::unique_ptr<spillway::ClientGpu> memory;
};

struct spillway_step_graph {
  std::unique_ptr<spillway::StepGraph> graph;
};

struct spillway_decoder {
  std::unique_ptr<spillway::ClientDecoder> decoder;
  std::string results;

  // Returns 0 or the error's code. Stores an error as the last one of this thread.
  int Code(const absl::Status& status) const {
    return status.ok() ? 0 : SetError(status, decoder->DetailsOf(status));
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
                     channel.embedded->BeginStep(description.text, trace));
    RETURN_IF_ERROR(spillway::CheckShape(description.shape, spillway::ShapeOf(*begun)));
    step = std::make_unique<spillway::EmbeddedStep>(channel.embedded, std::move(begun), trace);
  } else if (carrier == SPILLWAY_DOORBELL) {
    ASSIGN_OR_RETURN(step, spillway::DoorbellStep::Begin(channel.session, description));
  } else {
    ASSIGN_OR_RETURN(step,
                     spillway::MessageStep::Begin(channel.channel, channel.client_id, description));
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

int spillway_interface() { return SPILLWAY_INTERFACE; }

int spillway_error(const char** message, const void** details, size_t* details_size) {
  // A copy, because the text of a status need not end with NUL.
  thread_local std::string text;
  text = std::string(last_error.message());
  *message = text.c_str();
  *details = last_details.data();
  *details_size = last_details.size();
  return static_cast<int>(last_error.code());
}

spillway_channel* spillway_channel_open(const char* target, const spillway_access* access,
                                        const char* client_id) {
  return OrNull<spillway_channel>([&]() -> absl::StatusOr<spillway_channel*> {
    const spillway_access given = access == nullptr ? spillway_access{} : *access;
    const auto text = [](const char* of) { return of == nullptr ? "" : of; };
    ASSIGN_OR_RETURN(std::shared_ptr<grpc::Channel> channel,
                     spillway::OpenChannel(target, {text(given.tls_ca), text(given.tls_certificate),
                                                    text(given.tls_key), text(given.token)}));
    std::unique_ptr<spillway::PresenceKeeper> presence;
    if (client_id == nullptr) presence = std::make_unique<spillway::PresenceKeeper>(channel);
    const std::string id = client_id == nullptr ? presence->client_id() : client_id;
    return new spillway_channel{nullptr, channel, id,
                                std::make_shared<spillway::DaemonSession>(target, channel, id),
                                std::move(presence)};
  });
}

spillway_channel* spillway_channel_embed(const char* const* settings, size_t setting_count) {
  return OrNull<spillway_channel>([&]() -> absl::StatusOr<spillway_channel*> {
    std::vector<std::pair<std::string, std::string>> named;
    for (size_t i = 0; i < setting_count; ++i) {
      named.push_back(absl::StrSplit(settings[i], absl::MaxSplits('=', 1)));
    }
    ASSIGN_OR_RETURN(std::shared_ptr<spillway::Embedded> embedded, spillway::Embedded::Open(named));
    return new spillway_channel{embedded, embedded->channel(), "", nullptr, nullptr};
  });
}

void spillway_channel_close(spillway_channel* channel) { delete channel; }

spillway_call* spillway_call_open(spillway_channel* channel, const char* method,
                                  double timeout_seconds, const char* trace_id) {
  return OrNull<spillway_call>([&]() -> absl::StatusOr<spillway_call*> {
    const std::string trace = trace_id == nullptr ? "" : trace_id;
    RETURN_IF_ERROR(spillway::CheckTraceId(trace));
    return new spillway_call(channel->channel, method, timeout_seconds, channel->client_id, trace);
  });
}

int spillway_call_send(spillway_call* call, const void* message, size_t size) {
  return call->Send(message, size);
}

void spillway_call_send_end(spillway_call* call) { call->SendEnd(); }

int spillway_call_receive(spillway_call* call, double timeout_seconds, const void** message,
                          size_t* size) {
  return call->Receive(timeout_seconds, message, size);
}

int spillway_call_status(spillway_call* call, const char** message, const void** details,
                         size_t* details_size) {
  *message = call->message().c_str();
  *details = call->details().data();
  *details_size = call->details().size();
  return call->status().error_code();
}

void spillway_call_cancel(spillway_call* call) { call->Cancel(); }

void spillway_call_close(spillway_call* call) { delete call; }

spillway_step* spillway_step_begin(spillway_channel* channel, const void* description, size_t size,
                                   const spillway_step_shape* shape, int carrier) {
  spillway::Embedded* const engine = channel->embedded.get();
  std::string trace;
  return OrNull<spillway_step>(
      [&]() -> absl::StatusOr<spillway_step*> {
        const std::string_view text(static_cast<const char*>(description), size);
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

spillway_gpu_region* spillway_gpu_region_map(const char* device, const void* handle, size_t size,
                                             void** address, int* ordinal) {
  return OrNull<spillway_gpu_region>([&]() -> absl::StatusOr<spillway_gpu_region*> {
    ASSIGN_OR_RETURN(std::unique_ptr<spillway::ClientGpu> memory,
                     spillway::MapGpuMemory(device, {static_cast<const char*>(handle), size}));
    *address = memory->data();
    *ordinal = memory->ordinal();
    return new spillway_gpu_region{std::move(memory)};
  });
}

void spillway_gpu_region_unmap(spillway_gpu_region* region) { delete region; }

spillway_decoder* spillway_decoder_open(spillway_channel* channel, const void* description,
                                        size_t size, int64_t token_count_max) {
  spillway::Embedded* const engine = channel->embedded.get();
  std::string trace;
  return OrNull<spillway_decoder>(
      [&]() -> absl::StatusOr<spillway_decoder*> {
        const std::string_view text(static_cast<const char*>(description), size);
        std::unique_ptr<spillway::ClientDecoder> decoder;
        if (engine != nullptr) {
          ASSIGN_OR_RETURN(std::unique_ptr<spillway::StreamDecoder> opened,
                           engine->OpenDecoder(text, token_count_max, trace));
          decoder = std::make_unique<spillway::EmbeddedDecoder>(channel->embedded,
                                                                std::move(opened), trace);
        } else {
          ASSIGN_OR_RETURN(
              decoder, spillway::DoorbellDecoder::Open(channel->session, text, token_count_max));
        }
        return new spillway_decoder{std::move(decoder), ""};
      },
      engine, trace);
}

int spillway_decoder_gpu(const spillway_decoder* decoder) { return decoder->decoder->gpu(); }

int spillway_decoder_next(spillway_decoder* decoder, void* stream, uint64_t* version) {
  const absl::Status status = Caught([&] { return decoder->decoder->Next(stream); });
  *version = decoder->decoder->version();
  return decoder->Code(status);
}

int spillway_decoder_attend(spillway_decoder* decoder, int layer,
                            const spillway_step_tensors* tensors, void* stream) {
  return decoder->Code(Caught([&]() -> absl::Status {
    ASSIGN_OR_RETURN(const spillway::StepTensors places, TensorsOf(*tensors));
    return decoder->decoder->Attend(layer, places, stream);
  }));
}

spillway_step_graph* spillway_step_graph_new(void) {
  return OrNull<spillway_step_graph>([]() -> absl::StatusOr<spillway_step_graph*> {
    ASSIGN_OR_RETURN(std::unique_ptr<spillway::StepGraph> graph, spillway::NewStepGraph());
    return new spillway_step_graph{std::move(graph)};
  });
}

int spillway_step_graph_attend(spillway_step_graph* graph, int layer,
                               const spillway_step_tensors* tensors, void* stream) {
  return CodeOf(Caught([&]() -> absl::Status {
    ASSIGN_OR_RETURN(const spillway::StepTensors places, TensorsOf(*tensors));
    return graph->graph->LeaveOpen(layer, places, stream);
  }));
}

int spillway_step_graph_complete(spillway_step_graph* graph, void* captured) {
  return CodeOf(Caught([&] { return graph->graph->Complete(captured); }));
}

int spillway_step_graph_run_piece(spillway_step_graph* graph, int piece, void* stream) {
  return CodeOf(Caught([&] { return graph->graph->RunPiece(piece, stream); }));
}

void spillway_step_graph_free(spillway_step_graph* graph) { delete graph; }

int spillway_decoder_run(spillway_decoder* decoder, spillway_step_graph* graph, void* stream) {
  return decoder->Code(Caught([&] { return decoder->decoder->Run(*graph->graph, stream); }));
}

int spillway_decoder_finish(spillway_decoder* decoder, void* stream) {
  return decoder->Code(Caught([&] { return decoder->decoder->Finish(stream); }));
}

int spillway_decoder_results(spillway_decoder* decoder, int layer, const void** message,
                             size_t* size) {
  const absl::StatusOr<std::string> results =
      Caught([&] { return decoder->decoder->Results(layer); });
  decoder->results = results.value_or("");
  *message = decoder->results.data();
  *size = decoder->results.size();
  return decoder->Code(results.status());
}

spillway_sums spillway_decoder_sums_of(spillway_decoder* decoder, int layer) {
  const spillway::AttendSums sums =
      Caught([&] { return decoder->decoder->Sums(layer); }).value_or(spillway::AttendSums());
  return {sums.attend_count,          sums.touched_row_count,   sums.visible_row_count,
          sums.exact_count,           sums.statistical_count,   sums.none_count,
          sums.certified_error_count, sums.certified_error_sum,
          /*device_time_us=*/0};
}

void spillway_decoder_close(spillway_decoder* decoder) { delete decoder; }

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/stream_decoder.h"
#include "host/base/status_macros.h"
#include "lib/decoder.h"
#include "lib/doorbell_decoder.h"
#include "lib/embedded_steps.h"
#include "lib/gpu.h"
#include "lib/interface.h"
#include "services/embedded.h"
#include "spillway.h"

struct spillway_step_graph {
  std::unique_ptr<spillway::StepGraph> graph;
};

struct spillway_decoder {
  std::unique_ptr<spillway::ClientDecoder> decoder;
  std::string results;

  // Returns 0 or the error's code. Stores an error as the last one of this thread.
  int Code(const absl::Status& status) const {
    return status.ok() ? 0 : spillway::SetError(status, decoder->DetailsOf(status));
  }
};

spillway_decoder* spillway_decoder_open(spillway_channel* channel, const void* description,
                                        size_t size, int64_t token_count_max) {
  spillway::Embedded* const engine = channel->embedded.get();
  std::string trace;
  return spillway::OrNull<spillway_decoder>(
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
  const absl::Status status = spillway::Caught([&] { return decoder->decoder->Next(stream); });
  *version = decoder->decoder->version();
  return decoder->Code(status);
}

int spillway_decoder_attend(spillway_decoder* decoder, int layer,
                            const spillway_step_tensors* tensors, void* stream) {
  return decoder->Code(spillway::Caught([&]() -> absl::Status {
    ASSIGN_OR_RETURN(const spillway::StepTensors places, spillway::TensorsOf(*tensors));
    return decoder->decoder->Attend(layer, places, stream);
  }));
}

spillway_step_graph* spillway_step_graph_new(void) {
  return spillway::OrNull<spillway_step_graph>([]() -> absl::StatusOr<spillway_step_graph*> {
    ASSIGN_OR_RETURN(std::unique_ptr<spillway::StepGraph> graph, spillway::NewStepGraph());
    return new spillway_step_graph{std::move(graph)};
  });
}

int spillway_step_graph_attend(spillway_step_graph* graph, int layer,
                               const spillway_step_tensors* tensors, void* stream) {
  return spillway::CodeOf(spillway::Caught([&]() -> absl::Status {
    ASSIGN_OR_RETURN(const spillway::StepTensors places, spillway::TensorsOf(*tensors));
    return graph->graph->LeaveOpen(layer, places, stream);
  }));
}

int spillway_step_graph_complete(spillway_step_graph* graph, void* captured) {
  return spillway::CodeOf(spillway::Caught([&] { return graph->graph->Complete(captured); }));
}

int spillway_step_graph_run_piece(spillway_step_graph* graph, int piece, void* stream) {
  return spillway::CodeOf(spillway::Caught([&] { return graph->graph->RunPiece(piece, stream); }));
}

void spillway_step_graph_free(spillway_step_graph* graph) { delete graph; }

int spillway_decoder_run(spillway_decoder* decoder, spillway_step_graph* graph, void* stream) {
  return decoder->Code(
      spillway::Caught([&] { return decoder->decoder->Run(*graph->graph, stream); }));
}

int spillway_decoder_finish(spillway_decoder* decoder, void* stream) {
  return decoder->Code(spillway::Caught([&] { return decoder->decoder->Finish(stream); }));
}

int spillway_decoder_results(spillway_decoder* decoder, int layer, const void** message,
                             size_t* size) {
  const absl::StatusOr<std::string> results =
      spillway::Caught([&] { return decoder->decoder->Results(layer); });
  decoder->results = results.value_or("");
  *message = decoder->results.data();
  *size = decoder->results.size();
  return decoder->Code(results.status());
}

spillway_sums spillway_decoder_sums_of(spillway_decoder* decoder, int layer) {
  const spillway::AttendSums sums = spillway::Caught([&] {
                                      return decoder->decoder->Sums(layer);
                                    }).value_or(spillway::AttendSums());
  return {sums.attend_count,          sums.touched_row_count,   sums.visible_row_count,
          sums.exact_count,           sums.statistical_count,   sums.none_count,
          sums.certified_error_count, sums.certified_error_sum,
          /*device_time_us=*/0};
}

void spillway_decoder_close(spillway_decoder* decoder) { delete decoder; }

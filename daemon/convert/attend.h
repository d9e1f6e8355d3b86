#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/convert/tensor.h"
#include "daemon/engine/regions.h"
#include "daemon/engine/requests.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

inline constexpr int64_t kMessageBytesMax = int64_t{4} << 20;
inline constexpr int kQueryCountMax = 1024;

// Requests to the engine's; shapes, ranges and finiteness are checked and
// INVALID_ARGUMENT or OUT_OF_RANGE names the field. The results point into the
// messages' bytes, or keep what else they point to.
absl::Status CheckLayer(int32_t layer, const ModelSpec& spec);
absl::StatusOr<Chunk> ChunkFromProto(const v1::KvChunk& chunk, const ModelSpec& spec,
                                     const CallerRegions& regions);
// REQUIRES: CheckLayer(layer).
absl::StatusOr<Chunk> ChunkFromProto(const v1::NewRows& rows, int layer, const ModelSpec& spec,
                                     const CallerRegions& regions);
// The queries of an AttendItem or a DecodeRequest: everything but the
// sequence's name. path: of the item in its request, "items[2].".
// REQUIRES: out.sequence.
template <typename Item>
absl::Status QueryFromProto(const Item& item, const CallerRegions& regions, const std::string& path,
                            AttendItem& out);
// What Select and FetchPages ask of their item, whose rows all query heads
// share: one query, and a tail of one weight a row.
absl::Status CheckSelectable(const AttendQuery& attend);
// The dtype of out: q's, or f32 where asked.
absl::StatusOr<DType> OutDType(v1::DType asked, DType q_dtype);

// Where an attend's results go, as an AttendItem or a DecodeRequest asks.
struct ResultPlaces {
  DType out_dtype = DType::kF32;
  TensorPlace out;
  TensorPlace lse;
};
template <typename Item>
absl::StatusOr<ResultPlaces> PlacesFromProto(const Item& item, v1::DType out_dtype,
                                             const AttendQuery& attend, const ModelSpec& spec,
                                             const CallerRegions& regions, const std::string& path);

// Most bytes of an answer to an attend, beside the message's own frame.
int64_t ResultBytes(const AttendQuery& attend, const ModelSpec& spec, const ResultPlaces& places);

// The result of an item that succeeded.
absl::Status FillResult(const Job& job, const JobItem& item, const ModelSpec& spec,
                        const ResultPlaces& places, v1::AttendResult& out);
// The same without its tensors.
void FillFacts(const Job& job, const JobItem& item, v1::AttendResult& out);
void FillCertificate(const JobItem& item, v1::Certificate& certificate);
// The selection of an item with one query. RESOURCE_EXHAUSTED, reason
// RESPONSE_TOO_LARGE, when it does not fit in a message.
absl::Status FillSelection(const AttendResult& result, v1::Selection& selection);

}  // namespace spillway

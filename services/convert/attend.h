#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/regions.h"
#include "engine/requests.h"
#include "services/convert/tensor.h"
#include "spillway/v1/attention_service.pb.h"

namespace spillway {

inline constexpr int64_t kMessageBytesMax = int64_t{4} << 20;
inline constexpr int kQueryCountMax = 1024;

// Conversion of requests for the engine. Shapes, ranges and finiteness are checked;
// INVALID_ARGUMENT or OUT_OF_RANGE names the field. The results point into the messages' bytes, or
// keep alive what else they point to. A KvChunk in a region is not checked for finite elements
// (Chunk::shared_source).
absl::Status CheckLayer(int32_t layer, const ModelSpec& spec, const std::string& field = "layer");
absl::StatusOr<Chunk> ChunkFromProto(const v1::KvChunk& chunk, const ModelSpec& spec,
                                     const CallerRegions& regions);
// Fills `out` with the queries and the policy of an item. path: of the item in its request, such as
// "items[2].". REQUIRES: out.sequence is set.
absl::Status QueryFromProto(const v1::AttendItem& item, const CallerRegions& regions,
                            const std::string& path, AttendItem& out);
// Checks what Select requires of its item, because the query heads of a KV head
// share the selected rows: one query, and a tail with one weight per row.
absl::Status CheckSelectable(const AttendQuery& attend);
// The dtype of out: that of q, or f32 if asked for. INVALID_ARGUMENT for others.
absl::StatusOr<DType> OutDType(v1::DType asked, DType q_dtype,
                               const std::string& field = "out_dtype");

// Where an attend's results are written, as an item asks.
struct ResultPlaces {
  DType out_dtype = DType::kF32;
  TensorPlace out;
  TensorPlace lse;
};
absl::StatusOr<ResultPlaces> PlacesFromProto(const v1::AttendItem& item, v1::DType out_dtype,
                                             const AttendQuery& attend, const ModelSpec& spec,
                                             const CallerRegions& regions, const std::string& path);

// Bytes of an attend's result in an answer, at most.
int64_t ResultBytes(const AttendQuery& attend, const ModelSpec& spec, const ResultPlaces& places);

// Fills `out` with the result of an item that succeeded. After an error, `out` is empty.
absl::Status FillResult(const Job& job, const JobItem& item, const ModelSpec& spec,
                        const ResultPlaces& places, v1::AttendResult& out);
// The same without its tensors.
void FillFacts(const Job& job, const JobItem& item, v1::AttendResult& out);
void FillCertificate(const JobItem& item, v1::Certificate& certificate);
// The selection of an item with one query. RESOURCE_EXHAUSTED, reason RESPONSE_TOO_LARGE, if it
// does not fit in a message.
absl::Status FillSelection(const AttendResult& result, v1::Selection& selection);

}  // namespace spillway

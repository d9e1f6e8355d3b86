#include "engine/checks.h"

#include <limits>
#include <optional>
#include <span>
#include <string>

#include "absl/strings/str_cat.h"
#include "engine/errors.h"
#include "host/base/finite.h"
#include "host/device/errors.h"

namespace spillway {
namespace {

// The first element of one layer's K or V that is not finite, counted in C order.
std::optional<int64_t> FindInLayer(const RowSource& rows, const Chunk& chunk,
                                   const ModelSpec& spec) {
  const int64_t bytes = spec.element_row_bytes() / 2;
  const int64_t row_count = spec.kv_head_count * chunk.count;
  const auto row_at = [&](int64_t row) { return rows.Row(row / chunk.count, row % chunk.count); };
  // Rows that are adjacent in memory are checked at once, which is much faster.
  const bool dense = row_at(row_count - 1) == rows.data + (row_count - 1) * bytes &&
                     (chunk.count == 1 || rows.token_stride == bytes);
  const int64_t step = dense ? row_count : 1;
  for (int64_t row = 0; row < row_count; row += step) {
    const std::optional<int64_t> at =
        FindNonFinite({row_at(row), static_cast<size_t>(step * bytes)}, spec.dtype);
    if (at) return row * spec.head_dim + *at;
  }
  return std::nullopt;
}

absl::Status CheckRows(const Chunk& chunk, const ModelSpec& spec, const ChunkSource& source,
                       const char* what, std::string_view field) {
  for (int offset = 0; offset < chunk.layer_count; ++offset) {
    const std::optional<int64_t> at = FindInLayer(source.Layer(offset), chunk, spec);
    if (!at) continue;
    const int64_t row = *at / spec.head_dim;
    // Unsigned, because the client's start is not validated yet and the sum may overflow.
    const uint64_t token = static_cast<uint64_t>(chunk.start) + row % chunk.count;
    return NonFinite(NonFiniteRowError(what, chunk.layer_start + offset, row / chunk.count, token,
                                       *at % spec.head_dim),
                     field);
  }
  return absl::OkStatus();
}

std::vector<std::pair<std::string, std::string>> Length(int64_t layer, int64_t count) {
  return {{"layer", absl::StrCat(layer)}, {"layer_token_count", absl::StrCat(count)}};
}

}  // namespace

absl::Status NonFinite(const absl::Status& error, std::string_view field) {
  return WithFields(WithReason(error, Reason::kNonFinite),
                    {{std::string(field), std::string(error.message())}});
}

absl::Status CheckFinite(const Chunk& chunk, const ModelSpec& spec, const std::string& path) {
  absl::Status k = CheckRows(chunk, spec, chunk.k, "K", path + "k");
  return k.ok() ? CheckRows(chunk, spec, chunk.v, "V", path + "v") : k;
}

absl::Status CheckFinite(const AttendQuery& attend, const ModelSpec& spec, std::string_view field) {
  const int64_t bytes =
      attend.query_count * spec.query_head_count * spec.head_dim * DTypeBytes(attend.q_dtype);
  const std::optional<int64_t> at =
      FindNonFinite({attend.q, static_cast<size_t>(bytes)}, attend.q_dtype);
  if (!at) return absl::OkStatus();
  const int64_t row = *at / spec.head_dim;
  return NonFinite(absl::OutOfRangeError(absl::StrCat(
                       "q is not finite at query ", row / spec.query_head_count, ", query head ",
                       row % spec.query_head_count, ", element ", *at % spec.head_dim)),
                   field);
}

absl::Status OneModel::Add(const Sequence& sequence, const std::string& field) {
  if (!seen_.insert(&sequence).second) {
    return InvalidField(field, absl::StrCat(sequence.name, " is named twice"));
  }
  if (model_ == nullptr) model_ = sequence.model.get();
  if (model_ == sequence.model.get()) return absl::OkStatus();
  return InvalidField(field, absl::StrCat(sequence.name, " is of ", sequence.model->name,
                                          ", the first sequence is of ", model_->name));
}

absl::Status CheckStep(size_t part_count, int64_t token_count) {
  if (part_count == 0 || part_count > kAttendItemCountMax) {
    return InvalidField(
        "parts", absl::StrCat(part_count, " sequences are not in [1, ", kAttendItemCountMax, "]"));
  }
  if (token_count < 1 || token_count > kSparseQueryCountMax) {
    return InvalidField("token_count", absl::StrCat("value ", token_count, " is not in [1, ",
                                                    kSparseQueryCountMax, "]"));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> IsAppend(const Chunk& chunk, int offset, const LayerRows& rows) {
  const int64_t n = rows.token_count();
  const int layer = chunk.layer_start + offset;
  if (chunk.start == n) {
    if (chunk.count <= kTokenCountMax - n) return true;
    return WithReason(
        absl::OutOfRangeError(absl::StrCat("layer ", layer, " has ", n, " tokens; ", chunk.count,
                                           " more would exceed the limit of ", kTokenCountMax)),
        Reason::kTokenStartOutOfRange, Length(layer, n));
  }
  // By subtraction: start + count may overflow.
  if (chunk.start > n || chunk.count > n - chunk.start) {
    return WithReason(
        absl::OutOfRangeError(absl::StrCat("layer ", layer, " has ", n, " tokens; an append of ",
                                           chunk.count, " tokens at position ", chunk.start,
                                           " neither follows them nor lies within them")),
        Reason::kTokenStartOutOfRange, Length(layer, n));
  }
  if (rows.Equals(chunk.start, chunk.count, chunk.k.Layer(offset), chunk.v.Layer(offset))) {
    return false;
  }
  return WithReason(
      absl::AlreadyExistsError(absl::StrCat("layer ", layer, " has other rows at tokens [",
                                            chunk.start, ", ", chunk.start + chunk.count, ")")),
      Reason::kRowsDiffer, Length(layer, n));
}

absl::Status CheckHome(const Device& gpu, const Device& home, const Sequence& sequence,
                       const std::string& field) {
  if (&gpu == &home) return absl::OkStatus();
  return InvalidField(field, absl::StrCat("is in the memory of ", gpu.info().name, ", but ",
                                          sequence.name, " is on ", home.info().name));
}

absl::Status CheckGeneration(int64_t generation, const Sequence& sequence) {
  if (generation == sequence.generation) return absl::OkStatus();
  return WithReason(
      absl::AbortedError(absl::StrCat(sequence.name, " is at generation ", sequence.generation,
                                      ", the request at ", generation, ": it was truncated since")),
      Reason::kStaleGeneration, {{"generation", absl::StrCat(sequence.generation)}});
}

absl::Status ResolveVisible(int64_t layer_token_count, AttendQuery& attend) {
  const int64_t n = layer_token_count;
  if (attend.visible.empty()) {
    if (attend.query_count > n) {
      return WithReason(absl::OutOfRangeError(absl::StrCat(attend.query_count,
                                                           " queries over the last tokens of ",
                                                           "a layer that has only ", n)),
                        Reason::kQueryCountOutOfRange, {{"layer_token_count", absl::StrCat(n)}});
    }
    for (int64_t t = 0; t < attend.query_count; ++t) {
      attend.visible.push_back(n - attend.query_count + 1 + t);
    }
    return absl::OkStatus();
  }
  for (size_t t = 0; t < attend.visible.size(); ++t) {
    if (attend.visible[t] >= 1 && attend.visible[t] <= n) continue;
    return WithReason(
        absl::OutOfRangeError(absl::StrCat("visible_token_counts[", t, "]: value ",
                                           attend.visible[t], " is not in [1, ", n, "]")),
        Reason::kVisibleTokenCountOutOfRange, {{"layer_token_count", absl::StrCat(n)}});
  }
  return absl::OkStatus();
}

}  // namespace spillway

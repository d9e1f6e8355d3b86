#include "engine/snapshot/load.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/checks.h"
#include "engine/errors.h"
#include "engine/sha256.h"
#include "host/base/int8_rows.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

// Layers of a file are read together, up to this many bytes.
constexpr int64_t kChunkBytes = int64_t{8} << 20;
// About how much memory one byte of JSON may need when it is parsed.
constexpr int64_t kParsedBytesPerByte = 32;

std::span<std::byte> BytesOf(std::string& text) {
  return std::as_writable_bytes(std::span(text.data(), text.size()));
}

absl::Status OtherBytes(const std::string& path) {
  return absl::DataLossError(
      absl::StrCat(path, " does not have the digest that the manifest names"));
}

// Opens a file, and checks that it has the size in the manifest.
absl::StatusOr<SnapshotFile> OpenSized(const SnapshotFolder& folder, const std::string& name,
                                       int64_t byte_count) {
  absl::StatusOr<SnapshotFile> file = folder.Open(name);
  if (absl::IsNotFound(file.status()) || absl::IsFailedPrecondition(file.status())) {
    return absl::DataLossError(absl::StrCat(file.status().message(), ", though ",
                                            folder.PathOf(kManifestName), " names it"));
  }
  if (file.ok() && file->byte_count() != byte_count) {
    return absl::DataLossError(
        absl::StrCat(file->path(), " has ", file->byte_count(), " bytes, not ", byte_count));
  }
  return file;
}

// Checks rows of 8 bits that chunk.k has as they are stored.
absl::Status CheckStored(const Chunk& chunk, const ModelSpec& spec) {
  for (int layer = 0; layer < chunk.layer_count; ++layer) {
    const RowSource rows = chunk.k.Layer(layer);
    for (int head = 0; head < spec.kv_head_count; ++head) {
      for (int64_t t = 0; t < chunk.count; ++t) {
        if (IsInt8Row(spec.row_format(), rows.Row(head, t))) continue;
        return absl::DataLossError(absl::StrCat(
            "the row of layer ", chunk.layer_start + layer, ", KV head ", head, ", token ",
            chunk.start + t, " has a scale or an element's number that no row can have"));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status ReadFile(const SnapshotFolder& folder, const SnapshotLayout& layout,
                      const RowsFile& named, std::vector<std::byte>& buffer,
                      const CancelToken& cancel,
                      absl::FunctionRef<absl::Status(const Chunk&)> append) {
  const ModelSpec& spec = layout.spec();
  const TokenRun run = named.run;
  ASSIGN_OR_RETURN(SnapshotFile file, OpenSized(folder, SnapshotLayout::FileName(run, named.sha256),
                                                named.byte_count));
  const std::string expected = layout.Header(run);
  std::string header(expected.size(), '\0');
  RETURN_IF_ERROR(file.Read(BytesOf(header)));
  if (header != expected) return OtherBytes(file.path());
  Sha256 digest;
  digest.Add(BytesOf(header));
  const int64_t layer_bytes = layout.LayerBytes(run);
  const auto layers_at_once = static_cast<int>(static_cast<int64_t>(buffer.size()) / layer_bytes);
  for (int layer = 0; layer < spec.layer_count; layer += layers_at_once) {
    RETURN_IF_ERROR(cancel.Check());
    const int count = std::min(layers_at_once, spec.layer_count - layer);
    const std::span<std::byte> bytes(buffer.data(), static_cast<size_t>(count * layer_bytes));
    RETURN_IF_ERROR(file.Read(bytes));
    digest.Add(bytes);
    if (layer + count == spec.layer_count && digest.Finish() != named.sha256) {
      return OtherBytes(file.path());
    }
    Chunk chunk;
    chunk.layer_start = layer;
    chunk.layer_count = count;
    chunk.start = run.start;
    chunk.count = run.count();
    if (layout.has_halves()) {
      const int64_t row_bytes = spec.row_bytes() / 2;
      chunk.k = {RowSource::Dense(bytes.data(), run.count(), row_bytes), layer_bytes};
      chunk.v = {RowSource::Dense(bytes.data() + layout.HalfBytes(run), run.count(), row_bytes),
                 layer_bytes};
    } else {
      chunk.k = {RowSource::Dense(bytes.data(), run.count(), spec.row_bytes()), layer_bytes};
    }
    absl::Status status =
        layout.has_halves() ? CheckFinite(chunk, spec, "") : CheckStored(chunk, spec);
    if (!status.ok()) {
      return absl::DataLossError(absl::StrCat(file.path(), ": ", status.message()));
    }
    RETURN_IF_ERROR(append(chunk));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Manifest> ReadManifest(const SnapshotFolder& folder, MemoryBudget& budget) {
  absl::StatusOr<SnapshotFile> file = folder.Open(kManifestName);
  if (absl::IsNotFound(file.status())) {
    return WithReason(absl::NotFoundError(absl::StrCat("there is no snapshot at ", folder.path(),
                                                       ": it has no ", kManifestName)),
                      Reason::kSnapshotNotFound, {{"folder", folder.path()}});
  }
  RETURN_IF_ERROR(file.status());
  if (file->byte_count() > kManifestBytesMax) {
    return absl::DataLossError(absl::StrCat(file->path(), " has ", file->byte_count(),
                                            " bytes, more than ", kManifestBytesMax));
  }
  ASSIGN_OR_RETURN(const MemoryReservation reservation,
                   budget.Reserve(std::max<int64_t>(file->byte_count() * kParsedBytesPerByte, 1),
                                  "the manifest of a snapshot", MemoryUse::kMessages));
  std::string text(static_cast<size_t>(file->byte_count()), '\0');
  RETURN_IF_ERROR(file->Read(BytesOf(text)));
  absl::StatusOr<Manifest> manifest = ParseManifest(text);
  if (manifest.ok()) return manifest;
  return WithMessage(manifest.status(),
                     absl::StrCat(folder.path(), "/", manifest.status().message()));
}

absl::StatusOr<std::string> ReadClientData(const SnapshotFolder& folder, const Manifest& manifest) {
  if (!manifest.client_data) return "";
  const ClientDataFile& named = *manifest.client_data;
  ASSIGN_OR_RETURN(SnapshotFile file,
                   OpenSized(folder, ClientDataName(named.sha256), named.byte_count));
  std::string data(static_cast<size_t>(named.byte_count), '\0');
  RETURN_IF_ERROR(file.Read(BytesOf(data)));
  if (Sha256::Of(data) != named.sha256) return OtherBytes(file.path());
  return data;
}

absl::Status ReadRows(const SnapshotFolder& folder, const ModelSpec& spec, const Manifest& manifest,
                      MemoryBudget& budget, const CancelToken& cancel,
                      absl::FunctionRef<absl::Status(const Chunk&)> append) {
  const SnapshotLayout layout(spec, manifest.tokens_per_file);
  const TokenRun longest{0, std::min(manifest.tokens_per_file, manifest.token_count)};
  const int64_t layer_bytes = layout.LayerBytes(longest);
  const int64_t all_bytes = spec.layer_count * layer_bytes;
  const int64_t bytes = std::max(layer_bytes, std::min(kChunkBytes, all_bytes));
  ASSIGN_OR_RETURN(const MemoryReservation reservation,
                   budget.Reserve(std::max<int64_t>(bytes, 1), "the buffers of a snapshot",
                                  MemoryUse::kMessages));
  std::vector<std::byte> buffer(static_cast<size_t>(bytes));
  for (const RowsFile& file : manifest.files) {
    RETURN_IF_ERROR(ReadFile(folder, layout, file, buffer, cancel, append));
  }
  return absl::OkStatus();
}

}  // namespace spillway

#include "engine/snapshot/save.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/errors.h"
#include "engine/sha256.h"
#include "engine/snapshot/remove.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

// Buffer for the comparison with an existing file.
constexpr int64_t kCompareBytes = int64_t{1} << 20;

std::span<const std::byte> BytesOf(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// Writes the files of one snapshot.
class Saver {
 public:
  Saver(SnapshotFolder& folder, const SnapshotLayout& layout, std::span<const LayerRows> rows,
        int64_t token_count, const CancelToken& cancel)
      : folder_(folder),
        layout_(layout),
        rows_(rows),
        cancel_(cancel),
        block_(static_cast<size_t>(
            layout.LayerBytes({0, std::min(layout.tokens_per_file(), token_count)}))),
        compared_(static_cast<size_t>(kCompareBytes)) {}

  // names: the entries of the folder.
  absl::StatusOr<RowsFile> Save(TokenRun run, const std::vector<std::string>& names) {
    RowsFile file{.run = run, .byte_count = layout_.FileBytes(run), .sha256 = ""};
    const std::string prefix = SnapshotLayout::NamePrefix(run);
    for (const std::string& name : names) {
      if (!name.starts_with(prefix) || !IsDataFileName(name)) continue;
      ASSIGN_OR_RETURN(const std::optional<std::string> kept, Kept(run, name));
      if (!kept) continue;
      file.sha256 = *kept;
      return file;
    }
    RETURN_IF_ERROR(folder_.Begin(file.byte_count));
    Sha256 digest;
    RETURN_IF_ERROR(ForEachPiece(run, [&](std::span<const std::byte> piece) {
      digest.Add(piece);
      return folder_.Write(piece);
    }));
    file.sha256 = digest.Finish();
    RETURN_IF_ERROR(folder_.Commit(SnapshotLayout::FileName(run, file.sha256)));
    written_byte_count_ += file.byte_count;
    return file;
  }

  int64_t written_byte_count() const { return written_byte_count_; }

 private:
  // The header, then each layer's K and V.
  template <typename Take>
  absl::Status ForEachPiece(TokenRun run, const Take& take) {
    const std::string header = layout_.Header(run);
    RETURN_IF_ERROR(take(BytesOf(header)));
    const int64_t stored_bytes = layout_.spec().row_bytes();
    const int64_t row_bytes = layout_.has_halves() ? stored_bytes / 2 : stored_bytes;
    const int64_t head_bytes = run.count() * row_bytes;
    const RowTarget k{block_.data(), head_bytes, row_bytes};
    RowTarget v;
    if (layout_.has_halves()) v = {block_.data() + layout_.HalfBytes(run), head_bytes, row_bytes};
    for (const LayerRows& layer : rows_) {
      RETURN_IF_ERROR(cancel_.Check());
      for (int head = 0; head < layer.kv_head_count(); ++head) {
        layer.ReadRows(head, run.start, 0, run.count(), k, v);
      }
      RETURN_IF_ERROR(take(
          std::span<const std::byte>(block_).first(static_cast<size_t>(layout_.LayerBytes(run)))));
    }
    return absl::OkStatus();
  }

  // The digest of the file if it holds exactly the bytes of the run; otherwise nothing.
  absl::StatusOr<std::optional<std::string>> Kept(TokenRun run, const std::string& name) {
    absl::StatusOr<SnapshotFile> file = folder_.Open(name);
    if (!file.ok() || file->byte_count() != layout_.FileBytes(run)) return std::nullopt;
    Sha256 digest;
    bool equal = true;
    absl::Status status = ForEachPiece(run, [&](std::span<const std::byte> piece) {
      digest.Add(piece);
      while (!piece.empty() && equal) {
        const auto part = piece.first(std::min(piece.size(), compared_.size()));
        const std::span<std::byte> there(compared_.data(), part.size());
        equal = file->Read(there).ok() && std::memcmp(there.data(), part.data(), part.size()) == 0;
        piece = piece.subspan(part.size());
      }
      // Only to end the loop.
      return equal ? absl::OkStatus() : absl::DataLossError("other bytes");
    });
    if (!equal) return std::nullopt;
    RETURN_IF_ERROR(status);
    std::string sha256 = digest.Finish();
    if (name != SnapshotLayout::FileName(run, sha256)) return std::nullopt;
    return sha256;
  }

  SnapshotFolder& folder_;
  const SnapshotLayout& layout_;
  const std::span<const LayerRows> rows_;
  const CancelToken& cancel_;
  std::vector<std::byte> block_;     // K and V of one layer, for the tokens of a run
  std::vector<std::byte> compared_;  // bytes of an existing file
  int64_t written_byte_count_ = 0;
};

}  // namespace

absl::StatusOr<SavedSnapshot> SaveSnapshot(SnapshotFolder& folder, const ModelSpec& spec,
                                           std::span<const LayerRows> rows, Manifest manifest,
                                           std::span<const std::byte> client_data,
                                           MemoryBudget& budget, const CancelToken& cancel) {
  RETURN_IF_ERROR(CheckReplaceable(folder));
  const SnapshotLayout layout(spec);
  const TokenRun longest{0, std::min(layout.tokens_per_file(), manifest.token_count)};
  ASSIGN_OR_RETURN(const MemoryReservation reservation,
                   budget.Reserve(layout.LayerBytes(longest) + kCompareBytes,
                                  "the buffers of a snapshot", MemoryUse::kMessages));
  ASSIGN_OR_RETURN(const std::vector<std::string> names, folder.List());
  SavedSnapshot saved;
  Saver saver(folder, layout, rows, manifest.token_count, cancel);
  manifest.tokens_per_file = layout.tokens_per_file();
  for (int64_t i = 0; i < layout.FileCount(manifest.token_count); ++i) {
    ASSIGN_OR_RETURN(RowsFile file, saver.Save(layout.Run(i, manifest.token_count), names));
    saved.byte_count += file.byte_count;
    manifest.files.push_back(std::move(file));
  }
  saved.written_byte_count = saver.written_byte_count();
  std::set<std::string> named;
  for (const RowsFile& file : manifest.files) {
    named.insert(SnapshotLayout::FileName(file.run, file.sha256));
  }
  if (!client_data.empty()) {
    manifest.client_data = {static_cast<int64_t>(client_data.size()), Sha256::Of(client_data)};
    const std::string name = ClientDataName(manifest.client_data->sha256);
    RETURN_IF_ERROR(folder.Begin(manifest.client_data->byte_count));
    RETURN_IF_ERROR(folder.Write(client_data));
    RETURN_IF_ERROR(folder.Commit(name));
    named.insert(name);
    saved.byte_count += manifest.client_data->byte_count;
    saved.written_byte_count += manifest.client_data->byte_count;
  }
  const std::string text = ToText(manifest);
  if (static_cast<int64_t>(text.size()) > kManifestBytesMax) {
    return absl::OutOfRangeError(absl::StrCat("a manifest of ", text.size(), " bytes is above ",
                                              kManifestBytesMax, ": the sequence is too long"));
  }
  RETURN_IF_ERROR(cancel.Check());
  // The names of the files must be durable before the manifest that refers to them.
  RETURN_IF_ERROR(folder.Sync());
  RETURN_IF_ERROR(folder.Begin(static_cast<int64_t>(text.size())));
  RETURN_IF_ERROR(folder.Write(BytesOf(text)));
  RETURN_IF_ERROR(folder.Commit(kManifestName));
  RETURN_IF_ERROR(folder.Sync());
  for (const std::string& name : names) {
    if (IsDataFileName(name) && !named.contains(name)) folder.Remove(name).IgnoreError();
  }
  return saved;
}

}  // namespace spillway

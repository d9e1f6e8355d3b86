#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/memory/layer_record.h"
#include "host/memory/record_file.h"

namespace spillway {

// The data of one sequence that outlive the process: its description, its generation and its
// layers. A process that opens the file later finds the sequences that are listed. Not thread-safe.
class SequenceRecord {
 public:
  // A new record that is not listed. Only the caller interprets `description`. RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<SequenceRecord>> Create(RecordFile* file,
                                                                std::string_view description,
                                                                int layer_count, int kv_head_count);

  // Opens one of file->Find(RecordKind::kSequence). DATA_LOSS if it is damaged; then nothing is
  // claimed.
  struct Opened {
    std::string description;
    std::unique_ptr<SequenceRecord> record;
  };
  static absl::StatusOr<Opened> Open(RecordFile* file, RecordIndex root, int64_t page_token_count);

  // Frees the record unless it is listed.
  ~SequenceRecord();
  SequenceRecord(const SequenceRecord&) = delete;
  SequenceRecord& operator=(const SequenceRecord&) = delete;

  // Add the sequence to what a later process finds, or remove it; each is atomic. While it is
  // listed, its pages must not be reused.
  void List();
  void Unlist();

  int layer_count() const { return static_cast<int>(layers_.size()); }
  int kv_head_count() const { return kv_head_count_; }
  // The address of a layer's record never changes.
  LayerRecord& layer(int layer) { return layers_[layer]; }

  // Marks it permanently; the caller gives the mark its meaning.
  void Mark();
  bool marked() const;

  int64_t generation() const;
  // Cut all layers at once, for a process that opens the file later. Between the two calls the
  // caller cuts the layers that are longer. EndCut() sets the generation.
  void BeginCut(int64_t token_count, int64_t generation);
  void EndCut();
  // A cut that an earlier process began and did not end, which is then to be done. Nothing: none.
  struct Cut {
    int64_t token_count = 0;
    int64_t generation = 0;
  };
  std::optional<Cut> begun_cut() const;

 private:
  struct Root;

  SequenceRecord(RecordFile* file, RecordIndex root, int kv_head_count)
      : file_(file), root_(root), kv_head_count_(kv_head_count) {}

  Root& root() const;
  static absl::StatusOr<Opened> Read(RecordFile* file, RecordIndex root, int64_t page_token_count);

  RecordFile* const file_;
  const RecordIndex root_;
  const int kv_head_count_;
  std::vector<LayerRecord> layers_;
};

}  // namespace spillway

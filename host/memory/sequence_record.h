#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/memory/layer_record.h"
#include "host/memory/record_file.h"

namespace spillway {

// What outlives the process of one sequence: what it is, its generation, its layers. A process
// that opens the file later finds those that are listed. Not thread-safe.
class SequenceRecord {
 public:
  // Not listed. `description` is the caller's to read. RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<SequenceRecord>> Create(RecordFile* file,
                                                                std::string_view description,
                                                                int layer_count, int kv_head_count);

  // One of file->Find(RecordKind::kSequence), as a process before this one left it; what it was
  // about to cut is cut. DATA_LOSS for what cannot be: the record is given up then.
  struct Opened {
    std::string description;
    std::unique_ptr<SequenceRecord> record;
  };
  static absl::StatusOr<Opened> Open(RecordFile* file, RecordIndex root, int64_t page_token_count);

  // Gives its memory back unless it is listed.
  ~SequenceRecord();
  SequenceRecord(const SequenceRecord&) = delete;
  SequenceRecord& operator=(const SequenceRecord&) = delete;

  // At once, or not at all, for who opens the file later. A listed one's pages stay its own.
  void List();
  void Unlist();

  int layer_count() const { return static_cast<int>(layers_.size()); }
  int kv_head_count() const { return kv_head_count_; }
  // Stays where it is.
  LayerRecord& layer(int layer) { return layers_[layer]; }

  // Marks it, for good; what that means is the caller's. Files of before know no mark.
  void Mark();
  bool marked() const;

  int64_t generation() const;
  // Cuts all layers at once for who opens the file later: between the two calls the caller cuts
  // those that are longer. EndCut() sets the generation.
  void BeginCut(int64_t token_count, int64_t generation);
  void EndCut();

 private:
  struct Root;

  SequenceRecord(RecordFile* file, RecordIndex root, int kv_head_count)
      : file_(file), root_(root), kv_head_count_(kv_head_count) {}

  Root& root() const;
  absl::Status OpenLayers(int64_t page_token_count);

  RecordFile* const file_;
  const RecordIndex root_;
  const int kv_head_count_;
  std::vector<LayerRecord> layers_;
};

}  // namespace spillway

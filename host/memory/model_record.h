#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/memory/record_file.h"

namespace spillway {

// What outlives the process of one model: what it is, and its weights, if it has any. A process
// that opens the file later finds those that are listed. Not thread-safe.
class ModelRecord {
 public:
  // Not listed, without weights. RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<ModelRecord>> Create(RecordFile* file,
                                                             std::string_view description);

  // One of file->Find(RecordKind::kModel). DATA_LOSS for what cannot be: the record is given up
  // then.
  struct Opened {
    std::string description;
    std::string weights;
    std::unique_ptr<ModelRecord> record;
  };
  static absl::StatusOr<Opened> Open(RecordFile* file, RecordIndex root);

  // Gives its memory back unless it is listed.
  ~ModelRecord();
  ModelRecord(const ModelRecord&) = delete;
  ModelRecord& operator=(const ModelRecord&) = delete;

  // Once, with all of them or none. RESOURCE_EXHAUSTED.
  absl::Status SetWeights(std::string_view weights);

  void List();
  void Unlist();

 private:
  struct Root;

  ModelRecord(RecordFile* file, RecordIndex root) : file_(file), root_(root) {}
  Root& root() const;

  RecordFile* const file_;
  const RecordIndex root_;
};

}  // namespace spillway

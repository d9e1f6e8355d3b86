#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/memory/record_file.h"

namespace spillway {

// The data of one model that outlive the process: its description, and its weights if it has any. A
// process that opens the file later finds the models that are listed. Not thread-safe.
class ModelRecord {
 public:
  // A new record that is not listed and has no weights. RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<ModelRecord>> Create(RecordFile* file,
                                                             std::string_view description);

  // Opens one of file->Find(RecordKind::kModel). DATA_LOSS if it is damaged; then nothing is
  // claimed.
  struct Opened {
    std::string description;
    std::string weights;
    std::unique_ptr<ModelRecord> record;
  };
  static absl::StatusOr<Opened> Open(RecordFile* file, RecordIndex root);

  // Frees the record unless it is listed.
  ~ModelRecord();
  ModelRecord(const ModelRecord&) = delete;
  ModelRecord& operator=(const ModelRecord&) = delete;

  // To be called once, with all weights. RESOURCE_EXHAUSTED changes nothing.
  absl::Status SetWeights(std::string_view weights);

  void List();
  void Unlist();

 private:
  struct Root;

  ModelRecord(RecordFile* file, RecordIndex root) : file_(file), root_(root) {}
  Root& root() const;
  static absl::StatusOr<Opened> Read(RecordFile* file, RecordIndex root);

  RecordFile* const file_;
  const RecordIndex root_;
};

}  // namespace spillway

#include "host/memory/model_record.h"

#include <atomic>
#include <utility>

#include "host/base/status_macros.h"

namespace spillway {

// Layout of the payload in the file.
struct ModelRecord::Root {
  uint32_t description;
  uint32_t description_bytes;
  uint64_t weights_bytes;
  std::atomic<uint32_t> weights;  // 0: none, or not written yet
};

ModelRecord::Root& ModelRecord::root() const { return file_->Payload<Root>(root_); }

absl::StatusOr<std::unique_ptr<ModelRecord>> ModelRecord::Create(RecordFile* file,
                                                                 std::string_view description) {
  ASSIGN_OR_RETURN(const RecordIndex index, file->Allocate());
  std::unique_ptr<ModelRecord> record(new ModelRecord(file, index));
  Root& root = record->root();
  root.description = 0;
  root.description_bytes = static_cast<uint32_t>(description.size());
  root.weights_bytes = 0;
  root.weights.store(0, std::memory_order_relaxed);
  ASSIGN_OR_RETURN(root.description, file->WriteBytes(description));
  return record;
}

absl::StatusOr<ModelRecord::Opened> ModelRecord::Open(RecordFile* file, RecordIndex index) {
  RETURN_IF_ERROR(file->Claim(index));
  Opened opened;
  opened.record.reset(new ModelRecord(file, index));
  Root& root = opened.record->root();
  absl::StatusOr<std::string> description =
      file->ReadBytes(root.description, root.description_bytes);
  absl::StatusOr<std::string> weights = "";
  const RecordIndex first = root.weights.load(std::memory_order_acquire);
  if (first != 0) {
    weights = file->ReadBytes(first, static_cast<int64_t>(root.weights_bytes));
  }
  if (!description.ok() || !weights.ok()) {
    opened.record->Unlist();
    root.description = 0;
    root.weights.store(0, std::memory_order_relaxed);
    return description.ok() ? weights.status() : description.status();
  }
  opened.description = *std::move(description);
  opened.weights = *std::move(weights);
  return opened;
}

ModelRecord::~ModelRecord() {
  const auto kind = static_cast<RecordKind>(file_->At(root_).kind.load(std::memory_order_relaxed));
  if (kind == RecordKind::kModel) return;
  file_->FreeChain(root().weights.load(std::memory_order_relaxed));
  file_->FreeChain(root().description);
  file_->Free(root_);
}

absl::Status ModelRecord::SetWeights(std::string_view weights) {
  ASSIGN_OR_RETURN(const RecordIndex first, file_->WriteBytes(weights));
  root().weights_bytes = weights.size();
  root().weights.store(first, std::memory_order_release);
  return absl::OkStatus();
}

void ModelRecord::List() {
  file_->At(root_).kind.store(static_cast<uint32_t>(RecordKind::kModel), std::memory_order_release);
}

void ModelRecord::Unlist() {
  file_->At(root_).kind.store(static_cast<uint32_t>(RecordKind::kPart), std::memory_order_release);
}

}  // namespace spillway

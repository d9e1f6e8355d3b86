#include "host/memory/model_record.h"

#include <atomic>
#include <optional>
#include <utility>

#include "host/base/status_macros.h"

namespace spillway {

namespace {

constexpr uint64_t kWeightsSalt = 2;

}  // namespace

// Layout of the payload in the file.
struct ModelRecord::Root {
  RecordRoot base;
  RecordText weights;
  CheckedWord has_weights;  // 1: all of them are written
};

ModelRecord::Root& ModelRecord::root() const { return file_->Payload<Root>(root_); }

absl::StatusOr<std::unique_ptr<ModelRecord>> ModelRecord::Create(RecordFile* file,
                                                                 std::string_view description) {
  ASSIGN_OR_RETURN(const RecordIndex index, file->Allocate());
  std::unique_ptr<ModelRecord> record(new ModelRecord(file, index));
  Root& root = record->root();
  root.base = {};
  root.weights = {};
  root.has_weights.Store(0, kWeightsSalt);
  ASSIGN_OR_RETURN(root.base.description, file->WriteText(description));
  root.base.sum = root.base.Sum(RecordKind::kModel);
  return record;
}

absl::StatusOr<ModelRecord::Opened> ModelRecord::Open(RecordFile* file, RecordIndex index) {
  const size_t claimed = file->claim_count();
  absl::StatusOr<Opened> opened = Read(file, index);
  if (!opened.ok()) file->Unclaim(claimed);
  return opened;
}

absl::StatusOr<ModelRecord::Opened> ModelRecord::Read(RecordFile* file, RecordIndex index) {
  RETURN_IF_ERROR(file->ClaimRoot(index, RecordKind::kModel));
  Opened opened;
  opened.record.reset(new ModelRecord(file, index));
  Root& root = opened.record->root();
  ASSIGN_OR_RETURN(opened.description, file->ReadText(root.base.description));
  const std::optional<uint64_t> has_weights = root.has_weights.Load(kWeightsSalt);
  if (!has_weights) return file->Damaged(index, "whether it has weights is damaged");
  if (*has_weights == 0) {
    root.weights = {};  // the earlier process may have begun to write them
  } else {
    ASSIGN_OR_RETURN(opened.weights, file->ReadText(root.weights));
  }
  return opened;
}

ModelRecord::~ModelRecord() {
  const auto kind = static_cast<RecordKind>(file_->At(root_).kind.load(std::memory_order_relaxed));
  if (kind == RecordKind::kModel) return;
  file_->FreeChain(static_cast<RecordIndex>(root().weights.first));
  file_->FreeChain(static_cast<RecordIndex>(root().base.description.first));
  file_->Free(root_);
}

absl::Status ModelRecord::SetWeights(std::string_view weights) {
  ASSIGN_OR_RETURN(root().weights, file_->WriteText(weights));
  root().has_weights.Store(1, kWeightsSalt);
  return absl::OkStatus();
}

void ModelRecord::List() {
  file_->At(root_).kind.store(static_cast<uint32_t>(RecordKind::kModel), std::memory_order_release);
}

void ModelRecord::Unlist() {
  file_->At(root_).kind.store(static_cast<uint32_t>(RecordKind::kPart), std::memory_order_release);
}

}  // namespace spillway

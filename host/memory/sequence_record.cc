#include "host/memory/sequence_record.h"

#include <algorithm>
#include <atomic>

#include "absl/strings/str_cat.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

constexpr int kCountMax = 1 << 20;  // most layers or KV heads: a record with more is no sequence
// Older versions left earlier contents of the record's memory here, which are never this value.
constexpr uint32_t kMarked = 0xb5e1c0d7;

}  // namespace

// Layout of the payload in the file.
struct SequenceRecord::Root {
  uint32_t description;
  uint32_t description_bytes;
  uint32_t layer_count;
  uint32_t kv_head_count;
  uint32_t first_layer;
  std::atomic<uint32_t> mark;
  std::atomic<uint64_t> generation;
  // If it differs from `generation`, layers longer than cut_token_count are still to be cut.
  std::atomic<uint64_t> next_generation;
  std::atomic<uint64_t> cut_token_count;
};

SequenceRecord::Root& SequenceRecord::root() const { return file_->Payload<Root>(root_); }

absl::StatusOr<std::unique_ptr<SequenceRecord>> SequenceRecord::Create(RecordFile* file,
                                                                       std::string_view description,
                                                                       int layer_count,
                                                                       int kv_head_count) {
  ASSIGN_OR_RETURN(const RecordIndex index, file->Allocate());
  std::unique_ptr<SequenceRecord> record(new SequenceRecord(file, index, kv_head_count));
  Root& root = record->root();
  root.description = 0;
  root.description_bytes = static_cast<uint32_t>(description.size());
  root.layer_count = static_cast<uint32_t>(layer_count);
  root.kv_head_count = static_cast<uint32_t>(kv_head_count);
  root.mark.store(0, std::memory_order_relaxed);
  root.generation.store(0, std::memory_order_relaxed);
  root.next_generation.store(0, std::memory_order_relaxed);
  ASSIGN_OR_RETURN(root.description, file->WriteBytes(description));
  record->layers_.reserve(layer_count);
  for (int layer = 0; layer < layer_count; ++layer) {
    ASSIGN_OR_RETURN(LayerRecord made, LayerRecord::Create(file, kv_head_count));
    if (layer == 0) {
      root.first_layer = made.first();
    } else {
      record->layers_.back().SetNextLayer(made.first());
    }
    record->layers_.push_back(std::move(made));
  }
  return record;
}

absl::StatusOr<SequenceRecord::Opened> SequenceRecord::Open(RecordFile* file, RecordIndex index,
                                                            int64_t page_token_count) {
  RETURN_IF_ERROR(file->Claim(index));
  const int kv_head_count = static_cast<int>(file->Payload<Root>(index).kv_head_count);
  Opened opened;
  opened.record.reset(new SequenceRecord(file, index, kv_head_count));
  SequenceRecord& record = *opened.record;
  const Root& root = record.root();
  absl::Status status;
  if (root.layer_count == 0 || root.layer_count > kCountMax || root.kv_head_count == 0 ||
      root.kv_head_count > kCountMax) {
    status = absl::DataLossError(absl::StrCat(root.layer_count, " layers of ", root.kv_head_count,
                                              " KV heads are no sequence"));
  }
  if (status.ok()) status = record.OpenLayers(page_token_count);
  if (status.ok()) {
    absl::StatusOr<std::string> description =
        file->ReadBytes(root.description, root.description_bytes);
    status = description.status();
    if (description.ok()) opened.description = *std::move(description);
  }
  if (!status.ok()) {
    // The records that it refers to cannot be trusted, and are not freed before the next start.
    record.Unlist();
    record.layers_.clear();
    record.root().description_bytes = 0;
    record.root().description = 0;
    return status;
  }
  return opened;
}

absl::Status SequenceRecord::OpenLayers(int64_t page_token_count) {
  Root& root = this->root();
  const uint64_t next_generation = root.next_generation.load(std::memory_order_relaxed);
  const bool cutting = next_generation != root.generation.load(std::memory_order_relaxed);
  const auto cut = static_cast<int64_t>(root.cut_token_count.load(std::memory_order_relaxed));
  layers_.reserve(root.layer_count);
  RecordIndex next = root.first_layer;
  for (uint32_t layer = 0; layer < root.layer_count; ++layer) {
    ASSIGN_OR_RETURN(LayerRecord record,
                     LayerRecord::Open(file_, next, kv_head_count_, page_token_count));
    next = record.next_layer();
    if (cutting && record.token_count() > cut) {
      if (cut < 0) return absl::DataLossError(absl::StrCat("a cut to ", cut, " tokens"));
      record.SetTokenCount(cut);
    }
    layers_.push_back(std::move(record));
  }
  root.generation.store(next_generation, std::memory_order_release);
  return absl::OkStatus();
}

SequenceRecord::~SequenceRecord() {
  const auto kind = static_cast<RecordKind>(file_->At(root_).kind.load(std::memory_order_relaxed));
  if (kind == RecordKind::kSequence) return;
  for (LayerRecord& layer : layers_) layer.Free();
  file_->FreeChain(root().description);
  file_->Free(root_);
}

void SequenceRecord::List() {
  file_->At(root_).kind.store(static_cast<uint32_t>(RecordKind::kSequence),
                              std::memory_order_release);
}

void SequenceRecord::Unlist() {
  file_->At(root_).kind.store(static_cast<uint32_t>(RecordKind::kPart), std::memory_order_release);
}

void SequenceRecord::Mark() { root().mark.store(kMarked, std::memory_order_release); }

bool SequenceRecord::marked() const {
  return root().mark.load(std::memory_order_relaxed) == kMarked;
}

int64_t SequenceRecord::generation() const {
  return static_cast<int64_t>(root().generation.load(std::memory_order_relaxed));
}

void SequenceRecord::BeginCut(int64_t token_count, int64_t generation) {
  Root& root = this->root();
  root.cut_token_count.store(static_cast<uint64_t>(token_count), std::memory_order_release);
  root.next_generation.store(static_cast<uint64_t>(generation), std::memory_order_release);
}

void SequenceRecord::EndCut() {
  Root& root = this->root();
  root.generation.store(root.next_generation.load(std::memory_order_relaxed),
                        std::memory_order_release);
}

}  // namespace spillway

#include "host/memory/sequence_record.h"

#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

constexpr uint32_t kCountMax = 1 << 20;  // most layers or KV heads

// Of the words of a sequence.
constexpr uint64_t kMarkSalt = 3;
constexpr uint64_t kGenerationSalt = 4;
constexpr uint64_t kNextGenerationSalt = 5;
constexpr uint64_t kCutSalt = 6;

// Places in RecordRoot::numbers.
enum Number { kLayerCount, kKvHeadCount, kFirstLayer };

}  // namespace

// Layout of the payload in the file.
struct SequenceRecord::Root {
  RecordRoot base;
  CheckedWord mark;  // 0 or 1
  CheckedWord generation;
  // If it differs from `generation`, layers longer than cut_token_count are still to be cut.
  CheckedWord next_generation;
  CheckedWord cut_token_count;
};

SequenceRecord::Root& SequenceRecord::root() const { return file_->Payload<Root>(root_); }

absl::StatusOr<std::unique_ptr<SequenceRecord>> SequenceRecord::Create(RecordFile* file,
                                                                       std::string_view description,
                                                                       int layer_count,
                                                                       int kv_head_count) {
  ASSIGN_OR_RETURN(const RecordIndex index, file->Allocate());
  std::unique_ptr<SequenceRecord> record(new SequenceRecord(file, index, kv_head_count));
  Root& root = record->root();
  root.base = {};
  root.base.numbers[kLayerCount] = static_cast<uint32_t>(layer_count);
  root.base.numbers[kKvHeadCount] = static_cast<uint32_t>(kv_head_count);
  root.mark.Store(0, kMarkSalt);
  root.generation.Store(0, kGenerationSalt);
  root.next_generation.Store(0, kNextGenerationSalt);
  root.cut_token_count.Store(0, kCutSalt);
  ASSIGN_OR_RETURN(root.base.description, file->WriteText(description));
  record->layers_.reserve(layer_count);
  for (int layer = 0; layer < layer_count; ++layer) {
    ASSIGN_OR_RETURN(LayerRecord made, LayerRecord::Create(file, kv_head_count));
    if (layer == 0) {
      root.base.numbers[kFirstLayer] = made.first();
    } else {
      record->layers_.back().SetNextLayer(made.first());
    }
    record->layers_.push_back(std::move(made));
  }
  root.base.sum = root.base.Sum(RecordKind::kSequence);
  return record;
}

absl::StatusOr<SequenceRecord::Opened> SequenceRecord::Open(RecordFile* file, RecordIndex index,
                                                            int64_t page_token_count) {
  const size_t claimed = file->claim_count();
  absl::StatusOr<Opened> opened = Read(file, index, page_token_count);
  if (!opened.ok()) file->Unclaim(claimed);
  return opened;
}

absl::StatusOr<SequenceRecord::Opened> SequenceRecord::Read(RecordFile* file, RecordIndex index,
                                                            int64_t page_token_count) {
  RETURN_IF_ERROR(file->ClaimRoot(index, RecordKind::kSequence));
  const Root& root = file->Payload<Root>(index);
  const uint32_t layer_count = root.base.numbers[kLayerCount];
  const uint32_t kv_head_count = root.base.numbers[kKvHeadCount];
  if (layer_count == 0 || layer_count > kCountMax || kv_head_count == 0 ||
      kv_head_count > kCountMax) {
    return file->Damaged(index, absl::StrCat(layer_count, " layers of ", kv_head_count,
                                             " KV heads are no sequence"));
  }
  if (!root.mark.Load(kMarkSalt) || !root.generation.Load(kGenerationSalt) ||
      !root.next_generation.Load(kNextGenerationSalt) || !root.cut_token_count.Load(kCutSalt)) {
    return file->Damaged(index, "its generation, its cut or its mark is damaged");
  }
  Opened opened;
  opened.record.reset(new SequenceRecord(file, index, static_cast<int>(kv_head_count)));
  ASSIGN_OR_RETURN(opened.description, file->ReadText(root.base.description));
  std::vector<LayerRecord>& layers = opened.record->layers_;
  layers.reserve(layer_count);
  RecordIndex next = root.base.numbers[kFirstLayer];
  for (uint32_t layer = 0; layer < layer_count; ++layer) {
    ASSIGN_OR_RETURN(
        LayerRecord record,
        LayerRecord::Open(file, next, static_cast<int>(kv_head_count), page_token_count));
    next = record.next_layer();
    layers.push_back(std::move(record));
  }
  return opened;
}

SequenceRecord::~SequenceRecord() {
  const auto kind = static_cast<RecordKind>(file_->At(root_).kind.load(std::memory_order_relaxed));
  if (kind == RecordKind::kSequence) return;
  for (LayerRecord& layer : layers_) layer.Free();
  file_->FreeChain(static_cast<RecordIndex>(root().base.description.first));
  file_->Free(root_);
}

void SequenceRecord::List() {
  file_->At(root_).kind.store(static_cast<uint32_t>(RecordKind::kSequence),
                              std::memory_order_release);
}

void SequenceRecord::Unlist() {
  file_->At(root_).kind.store(static_cast<uint32_t>(RecordKind::kPart), std::memory_order_release);
}

void SequenceRecord::Mark() { root().mark.Store(1, kMarkSalt); }

bool SequenceRecord::marked() const { return root().mark.value() == 1; }

int64_t SequenceRecord::generation() const {
  return static_cast<int64_t>(root().generation.value());
}

void SequenceRecord::BeginCut(int64_t token_count, int64_t generation) {
  root().cut_token_count.Store(static_cast<uint64_t>(token_count), kCutSalt);
  root().next_generation.Store(static_cast<uint64_t>(generation), kNextGenerationSalt);
}

void SequenceRecord::EndCut() {
  root().generation.Store(root().next_generation.value(), kGenerationSalt);
}

std::optional<SequenceRecord::Cut> SequenceRecord::begun_cut() const {
  const Root& root = this->root();
  if (root.next_generation.value() == root.generation.value()) return std::nullopt;
  return Cut{static_cast<int64_t>(root.cut_token_count.value()),
             static_cast<int64_t>(root.next_generation.value())};
}

}  // namespace spillway

// Restores models and sequences that an earlier process left in the store.
#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/caller.h"
#include "engine/engine.h"
#include "engine/errors.h"
#include "engine/rebuild_operation.h"
#include "engine/shared_prefix.h"
#include "host/base/limits.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

// The slabs that contain rows, and the model that owns each: all pages of a slab belong to one
// model's pool.
class SlabClaims {
 public:
  // rows_bytes: size of the file of rows.
  SlabClaims(int64_t slab_capacity, int64_t rows_bytes)
      : slab_capacity_(slab_capacity), rows_bytes_(rows_bytes) {}

  // Claims all slabs that contain the sequence's rows, up to damage to the record of their pages,
  // or none. DATA_LOSS if the record cannot be right; FAILED_PRECONDITION if slabs are in the file
  // but beyond the arena.
  absl::Status Add(const Model& model, SequenceRecord& record) {
    claimed_.clear();
    for (int layer = 0; layer < record.layer_count(); ++layer) {
      const LayerRecord& rows = record.layer(layer);
      const int64_t tokens = rows.ReadableTokenCount(kPageTokenCount);
      const int64_t pages = (tokens + kPageTokenCount - 1) / kPageTokenCount;
      for (int64_t page = 0; page < pages; ++page) {
        for (int head = 0; head < record.kv_head_count(); ++head) {
          RETURN_IF_ERROR(Claim(model, rows.PageIndex(head, page)));
        }
      }
    }
    for (const int64_t slab : claimed_) owners_.emplace(slab, &model);
    return absl::OkStatus();
  }

  // All claimed slabs.
  std::vector<SlabRun> Runs() const {
    std::vector<int64_t> slabs;
    slabs.reserve(owners_.size());
    for (const auto& [slab, model] : owners_) slabs.push_back(slab);
    std::sort(slabs.begin(), slabs.end());
    std::vector<SlabRun> runs;
    for (const int64_t slab : slabs) {
      if (runs.empty() || runs.back().first + runs.back().count != slab) runs.push_back({slab, 0});
      ++runs.back().count;
    }
    return runs;
  }

 private:
  absl::Status Claim(const Model& model, uint32_t index) {
    ASSIGN_OR_RETURN(const SlabRun run, model.row_pool.SlabsOf(index));
    if (!claimed_.empty() && claimed_.back() == run.first + run.count - 1) return absl::OkStatus();
    const int64_t end = run.first + run.count;
    if (end * kSlabBytes > rows_bytes_) {
      return absl::DataLossError(absl::StrCat("page ", index, " lies beyond the file of rows"));
    }
    if (end > slab_capacity_) {
      return absl::FailedPreconditionError(
          absl::StrCat("the rows of the earlier process end at byte ", end * kSlabBytes,
                       " of their file, but memory.limit leaves only ", slab_capacity_ * kSlabBytes,
                       " bytes for rows: set it as it was then"));
    }
    for (int64_t slab = run.first; slab < end; ++slab) {
      const auto owner = owners_.find(slab);
      if (owner != owners_.end() && owner->second != &model) {
        return absl::DataLossError(absl::StrCat("page ", index, " is ", owner->second->name, "'s"));
      }
      if (owner == owners_.end()) claimed_.push_back(slab);
    }
    return absl::OkStatus();
  }

  const int64_t slab_capacity_;
  const int64_t rows_bytes_;
  absl::flat_hash_map<int64_t, const Model*> owners_;
  std::vector<int64_t> claimed_;  // by the sequence of this Add(); a slab may occur twice
};

// The same error, with the name of its sequence or model.
absl::Status Of(const std::string& name, const absl::Status& status) {
  return WithMessage(status, absl::StrCat(name, ": ", status.message()));
}

// For a record that is damaged: what it belonged to, as far as that can be read.
std::string NameOf(const RecordFile& records, RecordIndex root) {
  const std::string description = records.DescriptionOf(root);
  if (const auto sequence = ParseStoredSequence(description); sequence.ok()) {
    return "sequences/" + sequence->id;
  }
  if (const auto model = ParseStoredModel(description); model.ok()) return "models/" + model->id;
  return "a model or sequence";
}

// An id that Caller::IdOf() can have made: others cannot be named in a call.
bool IsEngineId(std::string_view id) {
  const size_t slash = id.find('/');
  return Registry::IsValidId(ClientIdOf(id)) &&
         (slash == std::string_view::npos || Registry::IsValidId(NamespaceOf(id)));
}

absl::Status CheckEngineId(std::string_view id) {
  if (IsEngineId(id)) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("\"", absl::CHexEscape(std::string(id)), "\" is no id"));
}

struct Found {
  StoredSequence description;
  std::shared_ptr<Model> model;
  std::unique_ptr<SequenceRecord> record;
};

absl::Status CheckFits(const StoredSequence& description, SequenceRecord& record,
                       const ModelSpec& spec) {
  if (record.layer_count() != spec.layer_count || record.kv_head_count() != spec.kv_head_count) {
    return absl::DataLossError(absl::StrCat(record.layer_count(), " layers of ",
                                            record.kv_head_count(), " KV heads are not ", "models/",
                                            description.model_id, "'s"));
  }
  const std::vector<FieldError> errors = Validate(description.policy, spec);
  if (errors.empty()) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("policy.", errors.front().field, ": ", errors.front().description));
}

// Parses a record and claims its slabs. Does not set Found::record. Errors as SlabClaims::Add(),
// with the sequence's name, and DATA_LOSS if there is no such model, or another sequence in `ids`.
absl::StatusOr<Found> Read(const SequenceRecord::Opened& opened, const Registry& registry,
                           absl::flat_hash_set<std::string>& ids, SlabClaims& claims) {
  Found found;
  ASSIGN_OR_RETURN(found.description, ParseStoredSequence(opened.description));
  const std::string name = "sequences/" + found.description.id;
  absl::Status status = CheckEngineId(found.description.id);
  if (status.ok() && ids.contains(found.description.id)) {
    status = absl::DataLossError("there are two with this id");
  }
  if (!status.ok()) return Of(name, status);
  absl::StatusOr<std::shared_ptr<Model>> model = registry.FindModel(found.description.model_id);
  if (!model.ok()) {
    return absl::DataLossError(
        absl::StrCat(name, ": its model, models/", found.description.model_id, ", is lost"));
  }
  found.model = *std::move(model);
  status = CheckFits(found.description, *opened.record, found.model->spec);
  if (status.ok()) status = claims.Add(*found.model, *opened.record);
  if (!status.ok()) return Of(name, status);
  ids.insert(found.description.id);
  return found;
}

}  // namespace

absl::Status Engine::Record(Sequence& sequence, const Sequence* source) {
  if (options_.store == nullptr) return absl::OkStatus();
  const StoredSequence description{sequence.id,    sequence.model->id,   sequence.policy,
                                   sequence.ttl,   sequence.create_time, sequence.named,
                                   sequence.client};
  ASSIGN_OR_RETURN(
      sequence.record,
      SequenceRecord::Create(&options_.store->records(), Describe(description),
                             sequence.model->spec.layer_count, sequence.model->spec.kv_head_count));
  for (size_t layer = 0; layer < sequence.rows.size(); ++layer) {
    RETURN_IF_ERROR(sequence.rows[layer].Record(
        &sequence.record->layer(static_cast<int>(layer)),
        source == nullptr ? nullptr : &source->record->layer(static_cast<int>(layer))));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Sequence>> Engine::Adopt(StoredSequence description,
                                                        const std::shared_ptr<Model>& model,
                                                        std::unique_ptr<SequenceRecord> record) {
  Origin origin{description.named, nullptr};
  // Its client counts as gone since now, so its grace time begins, until the client connects again.
  if (!description.client.empty()) origin.client = ClientOf(description.client);
  auto sequence = std::make_shared<Sequence>(
      description.id, model, accounts_.Of(NamespaceOf(description.id)), description.policy,
      description.ttl, description.create_time, options_.clock(), origin, unnamed_grace_);
  if (record->marked()) sequence->Use(nullptr);
  sequence->record = std::move(record);
  sequence->generation = sequence->record->generation();
  sequence->rows.reserve(model->spec.layer_count);
  for (int layer = 0; layer < model->spec.layer_count; ++layer) {
    LayerRows& rows = sequence->rows.emplace_back(&model->row_pool, model->spec);
    const LayerRecord& kept = sequence->record->layer(layer);
    RETURN_IF_ERROR(rows.Adopt(kept, kept.ReadableTokenCount(kPageTokenCount)));
  }
  ASSIGN_OR_RETURN(sequence->device, device_->CreateSequence(*model->device()));
  return sequence;
}

absl::Status Engine::RestoreModels(RestoreReport& report) {
  RecordFile& records = options_.store->records();
  for (const RecordIndex root : records.Find(RecordKind::kModel)) {
    absl::StatusOr<ModelRecord::Opened> opened = ModelRecord::Open(&records, root);
    if (!opened.ok()) {
      report.lost.push_back(Of(NameOf(records, root), opened.status()));
      continue;
    }
    absl::StatusOr<StoredModel> description = ParseStoredModel(opened->description);
    if (!description.ok()) {
      return absl::FailedPreconditionError(
          absl::StrCat(description.status().message(), ": start the build that wrote it to ",
                       options_.store->path(), ", or delete the files there"));
    }
    absl::Status status = CheckEngineId(description->id);
    if (status.ok()) status = registry_.CheckNewModel(description->id);
    if (absl::IsDataLoss(status) || absl::IsAlreadyExists(status)) {
      opened->record->Unlist();
      report.lost.push_back(Of("models/" + description->id, status));
      continue;
    }
    ASSIGN_OR_RETURN(std::shared_ptr<Model> model,
                     MakeModel(description->id, description->spec, description->policy,
                               description->create_time));
    if (!model->spec.has_weights() || !opened->weights.empty()) {
      RETURN_IF_ERROR(UploadWeights(*model, std::as_bytes(std::span(opened->weights))));
    }
    model->record = std::move(opened->record);
    RETURN_IF_ERROR(registry_.AddModel(model));
    ++report.model_count;
  }
  return absl::OkStatus();
}

absl::StatusOr<RestoreReport> Engine::Restore(
    std::function<void(const Sequence&, const absl::Status&)> rebuilt) {
  RecordFile& records = options_.store->records();
  RestoreReport report;
  RETURN_IF_ERROR(RestoreModels(report));
  SlabClaims claims(arena_->slab_capacity(), options_.store->rows_bytes());
  std::vector<Found> found;
  absl::flat_hash_set<std::string> ids;
  for (const RecordIndex root : records.Find(RecordKind::kSequence)) {
    absl::StatusOr<SequenceRecord::Opened> opened =
        SequenceRecord::Open(&records, root, kPageTokenCount);
    if (!opened.ok()) {
      report.lost.push_back(Of(NameOf(records, root), opened.status()));
      continue;
    }
    absl::StatusOr<Found> one = Read(*opened, registry_, ids, claims);
    if (one.ok()) {
      one->record = std::move(opened->record);
      found.push_back(*std::move(one));
    } else if (absl::IsFailedPrecondition(one.status())) {
      return one.status();
    } else {
      opened->record->Unlist();
      report.lost.push_back(one.status());
    }
  }
  for (const RecordIndex record : records.FindDamaged()) {
    report.lost.push_back(
        Of(NameOf(records, record),
           records.Damaged(record, "its kind is damaged, so what it was is not restored")));
  }
  RETURN_IF_ERROR(arena_->Restore(claims.Runs()));
  records.FreeUnclaimed();
  std::vector<std::shared_ptr<Sequence>> sequences;
  for (Found& one : found) {
    ASSIGN_OR_RETURN(std::shared_ptr<Sequence> sequence,
                     Adopt(std::move(one.description), one.model, std::move(one.record)));
    sequences.push_back(std::move(sequence));
  }
  CheckRows(sequences, report);
  for (const std::shared_ptr<Sequence>& sequence : sequences) {
    RETURN_IF_ERROR(registry_.AddSequence(sequence));
    const SequenceSnapshot snapshot = sequence->snapshot();
    ++report.sequence_count;
    report.token_count += snapshot.token_count;
    report.row_bytes += snapshot.row_bytes;
  }
  // Computed before the first sequence changes its record.
  std::vector<std::optional<SharedPrefixes::Prefix>> prefixes;
  SharedPrefixes known;
  for (const std::shared_ptr<Sequence>& sequence : sequences) {
    prefixes.push_back(known.Add(*sequence->model, *sequence->record));
  }
  rebuilder_->Expect(static_cast<int64_t>(sequences.size()),
                     static_cast<int64_t>(report.lost.size()),
                     static_cast<int64_t>(report.damaged.size()));
  for (size_t i = 0; i < sequences.size(); ++i) {
    const std::shared_ptr<Sequence>& sequence = sequences[i];
    OrderedQueues::Queue* const queue = &sequence->queue;
    if (prefixes[i]) {
      const std::shared_ptr<Sequence>& source = sequences[prefixes[i]->source];
      const std::array<OrderedQueues::Queue*, 2> both = {&source->queue, queue};
      queues_.Enqueue(both, std::make_shared<ShareCodesOperation>(this, source, sequence,
                                                                  prefixes[i]->token_count));
    }
    queues_.Enqueue({&queue, 1}, std::make_shared<RebuildOperation>(this, sequence, rebuilt));
  }
  return report;
}

}  // namespace spillway

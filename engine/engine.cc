#include "engine/engine.h"

#include <algorithm>
#include <future>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/attend_sums.h"
#include "engine/caller.h"
#include "engine/errors.h"
#include "engine/rebuild_operation.h"
#include "engine/sha256.h"
#include "engine/store/description.h"
#include "host/base/random_id.h"
#include "host/base/status_macros.h"
#include "host/memory/checksum.h"

namespace spillway {
namespace {

// Bytes that a model takes without weights and sequences, rounded up.
constexpr int64_t kModelTableBytes = 8192;

// Distinguishes this sum from others of the same text.
constexpr uint64_t kSeedSalt = 64;

// If it is drawn, at most 2^63 - 1, the largest value of the setting.
uint64_t SamplingSeed(const EngineOptions& options) {
  if (options.sampling_seed.has_value()) return *options.sampling_seed;
  const std::string drawn = options.store != nullptr ? options.store->identity() : RandomId();
  return Checksum(drawn, kSeedSalt) >> 1;
}

}  // namespace

Engine::Engine(Device* device, Arena* arena, MemoryBudget* budget, EngineOptions options)
    : device_(device),
      arena_(arena),
      budget_(budget),
      options_(std::move(options)),
      sampling_seed_(SamplingSeed(options_)),
      slow_attends_(options_.slow_attend_seconds),
      device_watch_(*device, options_.device_lost),
      registry_(options_.model_count_max, options_.sequence_count_max, options_.clock,
                [this](const Sequence& sequence) { return queues_.IsIdle(sequence.queue); }),
      rebuilder_(std::make_unique<Rebuilder>()) {}

Engine::~Engine() {
  StopRebuilding();
  // Operations that were answered may not have ended: they hold sequences, and these hold pages of
  // the arena.
  queues_.AwaitNone();
}

absl::StatusOr<std::shared_ptr<Model>> Engine::MakeModel(const std::string& id,
                                                         const ModelSpec& spec,
                                                         const Policy& policy,
                                                         absl::Time create_time) {
  // Both the engine and the device hold the sink logits.
  int64_t table_bytes =
      kModelTableBytes + 2 * static_cast<int64_t>(spec.sink_logits.size() * sizeof(float));
  if (auditor() != nullptr && auditor()->share() > 0) table_bytes += AuditTable::BytesOf(spec);
  AccountCharge charge(accounts_.Of(NamespaceOf(id)));
  RETURN_IF_ERROR(charge.Add(table_bytes));
  ASSIGN_OR_RETURN(MemoryReservation tables,
                   budget_->Reserve(table_bytes, "the tables of a model", MemoryUse::kModels));
  auto model = std::make_shared<Model>(id, spec, policy, arena_, create_time);
  model->charge = std::move(charge);
  model->table_reservation = std::move(tables);
  return model;
}

absl::StatusOr<std::shared_ptr<Model>> Engine::CreateModel(const std::string& id,
                                                           const ModelSpec& spec,
                                                           const Policy& policy,
                                                           const CancelToken* cancel) {
  RETURN_IF_ERROR(registry_.CheckNewModel(id));  // before the work; AddModel() checks again
  ASSIGN_OR_RETURN(std::shared_ptr<Model> model, MakeModel(id, spec, policy, absl::Now()));
  if (options_.store != nullptr) {
    ASSIGN_OR_RETURN(
        model->record,
        ModelRecord::Create(&options_.store->records(),
                            Describe(StoredModel{id, spec, policy, model->create_time})));
  }
  if (!spec.has_weights()) {
    RETURN_IF_ERROR(UploadWeights(*model, {}, cancel));
  }
  RETURN_IF_ERROR(registry_.AddModel(model));
  return model;
}

absl::Status Engine::UploadWeights(Model& model, std::span<const std::byte> safetensors,
                                   const CancelToken* cancel) {
  if (model.ready()) {
    return WithReason(
        absl::FailedPreconditionError(absl::StrCat(model.name, " needs no hash weights")),
        Reason::kWeightsNotAwaited);
  }
  const int64_t bytes = device_->WeightBytes(model.spec);
  AccountCharge charge(accounts_.Of(NamespaceOf(model.id)));
  RETURN_IF_ERROR(charge.Add(bytes));
  ASSIGN_OR_RETURN(MemoryReservation reservation,
                   budget_->Reserve(bytes, "the hash weights of a model", MemoryUse::kModels));
  ASSIGN_OR_RETURN(std::unique_ptr<DeviceModel> device,
                   device_->CreateModel(model.spec, safetensors, cancel));
  std::string sha256 = safetensors.empty() ? "" : Sha256::Of(safetensors);
  // Before the model changes: an error must leave it as it was.
  if (cancel != nullptr) RETURN_IF_ERROR(cancel->Check());
  if (model.record != nullptr && !safetensors.empty()) {
    RETURN_IF_ERROR(model.record->SetWeights(
        {reinterpret_cast<const char*>(safetensors.data()), safetensors.size()}));
  }
  model.charge.Absorb(std::move(charge));
  model.SetDevice(std::move(device), std::move(reservation), std::move(sha256));
  return absl::OkStatus();
}

int64_t Engine::IndexBytesPerToken(const ModelSpec& spec) const {
  return device_->IndexBytesPerToken(spec) * spec.layer_count;
}

int64_t Engine::FreeTokenCount(const Model& model) const {
  const ModelSpec& spec = model.spec;
  int64_t host_bytes = spec.row_bytes() * spec.kv_head_count * spec.layer_count;
  int64_t free_count = std::numeric_limits<int64_t>::max();
  const int64_t index_bytes = IndexBytesPerToken(spec);
  std::optional<int64_t> device_bytes;  // free on the device with the most free memory
  for (const Device* part : device_->parts()) {
    const std::optional<DeviceMemory> memory = part->memory();
    if (!memory) continue;
    device_bytes = std::max(device_bytes.value_or(0), memory->limit_bytes - memory->used_bytes);
  }
  if (!device_bytes) {
    host_bytes += index_bytes;
  } else if (index_bytes > 0) {
    free_count = *device_bytes / index_bytes;
  }
  const int64_t spare_bytes = model.row_pool.spare_page_count() * model.row_pool.page_bytes();
  return std::min(free_count, (arena_->free_bytes() + spare_bytes) / host_bytes);
}

absl::StatusOr<std::shared_ptr<Sequence>> Engine::CreateSequence(
    const std::string& id, const std::shared_ptr<Model>& model, const Policy& policy,
    absl::Duration ttl, const Origin& origin) {
  ASSIGN_OR_RETURN(std::shared_ptr<Sequence> sequence,
                   MakeSequence(id, model, policy, ttl, origin));
  RETURN_IF_ERROR(registry_.AddSequence(sequence));
  return sequence;
}

absl::Status Engine::ListSequence(const std::shared_ptr<Sequence>& sequence) {
  Renew(*sequence);
  return registry_.AddSequence(sequence);
}

absl::StatusOr<std::shared_ptr<Sequence>> Engine::MakeSequence(const std::string& id,
                                                               const std::shared_ptr<Model>& model,
                                                               const Policy& policy,
                                                               absl::Duration ttl,
                                                               const Origin& origin) {
  if (!model->ready()) {
    return WithReason(absl::FailedPreconditionError(
                          absl::StrCat(model->name, " waits for the upload of its hash weights")),
                      Reason::kModelNotReady, {{"name", model->name}});
  }
  auto sequence = std::make_shared<Sequence>(id, model, accounts_.Of(NamespaceOf(id)), policy, ttl,
                                             absl::Now(), options_.clock(), origin, unnamed_grace_);
  RETURN_IF_ERROR(sequence->ReserveTables(*budget_));
  ASSIGN_OR_RETURN(sequence->device, device_->CreateSequence(*model->device()));
  sequence->rows.reserve(model->spec.layer_count);
  for (int l = 0; l < model->spec.layer_count; ++l) {
    sequence->rows.emplace_back(&model->row_pool, model->spec);
  }
  RETURN_IF_ERROR(Record(*sequence, nullptr));
  sequence->Publish();
  return sequence;
}

// Runs a function in a sequence's turn.
class Engine::SimpleOperation : public OrderedQueues::Operation {
 public:
  SimpleOperation(Engine* engine, std::shared_ptr<Sequence> sequence,
                  std::function<void(Sequence&)> run)
      : engine_(engine), sequence_(std::move(sequence)), run_(std::move(run)) {}

  void Start() override {
    run_(*sequence_);
    engine_->queues_.Finish(*this);
  }

 private:
  Engine* const engine_;
  const std::shared_ptr<Sequence> sequence_;
  const std::function<void(Sequence&)> run_;
};

void Engine::RunInTurn(std::shared_ptr<Sequence> sequence, std::function<void(Sequence&)> run) {
  OrderedQueues::Queue* const queue = &sequence->queue;
  queues_.Enqueue({&queue, 1},
                  std::make_shared<SimpleOperation>(this, std::move(sequence), std::move(run)));
}

// Stays at the head of the sequences' queues while a decoder holds them.
class Engine::HoldOperation : public OrderedQueues::Operation {
 public:
  explicit HoldOperation(std::vector<std::shared_ptr<Sequence>> sequences)
      : sequences_(std::move(sequences)) {}
  void Start() override { started_.set_value(); }
  void Wait() { started_.get_future().wait(); }
  const std::vector<std::shared_ptr<Sequence>>& sequences() const { return sequences_; }

 private:
  const std::vector<std::shared_ptr<Sequence>> sequences_;
  std::promise<void> started_;
};

absl::StatusOr<std::shared_ptr<Engine::HoldOperation>> Engine::Hold(
    std::vector<std::shared_ptr<Sequence>> sequences) {
  std::vector<OrderedQueues::Queue*> queues;
  for (const std::shared_ptr<Sequence>& sequence : sequences) {
    if (sequence->held.exchange(true)) {
      for (size_t i = 0; i < queues.size(); ++i) sequences[i]->held = false;
      return SequenceHeld(sequence->name);
    }
    queues.push_back(&sequence->queue);
  }
  auto hold = std::make_shared<HoldOperation>(std::move(sequences));
  queues_.Enqueue(queues, hold);
  hold->Wait();
  return hold;
}

void Engine::Release(HoldOperation& hold) {
  for (const std::shared_ptr<Sequence>& sequence : hold.sequences()) sequence->held = false;
  queues_.Finish(hold);
}

absl::StatusOr<std::shared_ptr<Sequence>> Engine::ForkNow(Sequence& source, const std::string& id,
                                                          const Origin& origin) {
  const std::shared_ptr<Model>& model = source.model;
  const int64_t length = source.token_count();
  auto copy =
      std::make_shared<Sequence>(id, model, accounts_.Of(NamespaceOf(id)), source.policy,
                                 source.ttl, absl::Now(), options_.clock(), origin, unnamed_grace_);
  ASSIGN_OR_RETURN(copy->device, device_->ForkSequence(*model->device(), *source.device, length));
  copy->rows.reserve(source.rows.size());
  for (const LayerRows& layer : source.rows) copy->rows.push_back(layer.Share(length));
  RETURN_IF_ERROR(copy->ReserveTables(*budget_));
  RETURN_IF_ERROR(copy->Charge());
  RETURN_IF_ERROR(Record(*copy, &source));
  copy->Publish();
  RETURN_IF_ERROR(registry_.AddSequence(copy));
  return copy;
}

void Engine::Fork(std::shared_ptr<Sequence> source, const std::string& id,
                  Done<std::shared_ptr<Sequence>> done, const Origin& origin) {
  if (source->held) return done(SequenceHeld(source->name));
  RunInTurn(std::move(source), [this, id, origin, done = std::move(done)](Sequence& sequence) {
    if (absl::Status status = sequence.Check(); !status.ok()) return done(std::move(status));
    done(ForkNow(sequence, id, origin));
  });
}

void Engine::Truncate(std::shared_ptr<Sequence> sequence, int64_t token_count,
                      std::function<void(absl::Status)> done) {
  if (sequence->held) return done(SequenceHeld(sequence->name));
  RunInTurn(std::move(sequence), [this, token_count, done = std::move(done)](Sequence& sequence) {
    if (absl::Status status = sequence.CheckOpen(); !status.ok()) return done(std::move(status));
    const int64_t length = sequence.token_count();
    if (token_count < 0 || token_count > length) {
      return done(WithReason(
          absl::OutOfRangeError(absl::StrCat("token_count: value ", token_count, " is not in [0, ",
                                             length, "], the length of ", sequence.name)),
          Reason::kTokenCountOutOfRange, {{"token_count", absl::StrCat(length)}}));
    }
    ++sequence.generation;
    if (sequence.record != nullptr) sequence.record->BeginCut(token_count, sequence.generation);
    for (LayerRows& layer : sequence.rows) {
      if (layer.token_count() > token_count) layer.Truncate(token_count);
    }
    if (sequence.record != nullptr) sequence.record->EndCut();
    device_->TruncateSequence(*sequence.model->device(), *sequence.device, token_count);
    sequence.Publish();
    done(absl::OkStatus());
  });
}

void Engine::Seal(std::shared_ptr<Sequence> sequence, bool sealed,
                  std::function<void(absl::Status)> done) {
  if (sequence->held) return done(SequenceHeld(sequence->name));
  RunInTurn(std::move(sequence), [sealed, done = std::move(done)](Sequence& sequence) {
    if (absl::Status status = sequence.Check(); !status.ok()) return done(std::move(status));
    sequence.sealed = sealed;
    sequence.Publish();
    done(absl::OkStatus());
  });
}

void Engine::Delete(std::string_view id, std::function<void(absl::Status)> done) {
  absl::StatusOr<std::shared_ptr<Sequence>> sequence = registry_.FindSequence(id);
  if (sequence.ok() && (*sequence)->held) return done(SequenceHeld((*sequence)->name));
  sequence = registry_.TakeSequence(id);
  if (!sequence.ok()) return done(sequence.status());
  RunInTurn(*std::move(sequence), [done = std::move(done)](Sequence& sequence) {
    sequence.Clear();
    done(absl::OkStatus());
  });
}

void Engine::DeleteSealed(std::string_view id, std::function<void(absl::Status)> done) {
  absl::StatusOr<std::shared_ptr<Sequence>> sequence = registry_.FindSequence(id);
  if (!sequence.ok()) return done(sequence.status());
  if ((*sequence)->held) return done(SequenceHeld((*sequence)->name));
  // It stays in the registry until its turn comes: if it is not sealed then, it is not deleted.
  RunInTurn(*std::move(sequence), [this, done = std::move(done)](Sequence& sequence) {
    if (sequence.deleted()) return done(SequenceNotFound(sequence.name));
    if (!sequence.sealed) return done(SequenceNotSealed(sequence.name));
    absl::Status taken = registry_.TakeSequence(sequence.id, &sequence).status();
    if (taken.ok()) sequence.Clear();
    done(std::move(taken));
  });
}

std::vector<ExpiredSequence> Engine::SweepExpired() {
  std::vector<ExpiredSequence> expired;
  const SteadyTime now = options_.clock();
  for (std::shared_ptr<Sequence>& sequence : registry_.TakeExpired(now)) {
    using Why = ExpiredSequence::Why;
    const Why why = sequence->idle_end() <= now ? Why::kIdle : Why::kAbandoned;
    auto& count =
        why == Why::kIdle ? counters_.idle_expiry_count : counters_.abandoned_expiry_count;
    count.fetch_add(1, std::memory_order_relaxed);
    expired.push_back({why, sequence->name, sequence->model->name, sequence->snapshot().token_count,
                       absl::FromChrono(now - sequence->last_use_time()), sequence->trace});
    RunInTurn(std::move(sequence), [](Sequence& sequence) { sequence.Clear(); });
  }
  return expired;
}

void Engine::ShareRows(std::shared_ptr<Sequence> sequence, int layer, Done<SharedRows> done) {
  if (sequence->held) return done(SequenceHeld(sequence->name));
  RunInTurn(std::move(sequence), [this, layer, done = std::move(done)](Sequence& sequence) {
    if (absl::Status status = sequence.Check(); !status.ok()) return done(std::move(status));
    const LayerRows& rows = sequence.rows[layer];
    done(SharedRows{rows.Share(rows.token_count()), &device_->HomeOf(*sequence.device)});
  });
}

void Engine::ShareSequence(std::shared_ptr<Sequence> sequence, Done<SharedSequence> done) {
  if (sequence->held) return done(SequenceHeld(sequence->name));
  RunInTurn(std::move(sequence), [done = std::move(done)](Sequence& sequence) {
    if (absl::Status status = sequence.Check(); !status.ok()) return done(std::move(status));
    SharedSequence shared;
    shared.token_count = sequence.token_count();
    shared.generation = sequence.generation;
    shared.rows.reserve(sequence.rows.size());
    for (const LayerRows& rows : sequence.rows) {
      shared.rows.push_back(rows.Share(shared.token_count));
    }
    done(std::move(shared));
  });
}

absl::Status Engine::PrepareAppend(Sequence& sequence, std::span<const int> layers, int64_t count) {
  const ModelSpec& spec = sequence.model->spec;
  const int64_t row_bytes =
      static_cast<int64_t>(layers.size()) * count * spec.kv_head_count * spec.row_bytes();
  // A decode step needs less than a slab, so the arena need not prepare for it.
  if (row_bytes > kSlabBytes) {
    const PagePool& pool = sequence.model->row_pool;
    arena_->Expect(row_bytes - pool.spare_page_count() * pool.page_bytes());
  }
  absl::Status status = absl::OkStatus();
  size_t prepared = 0;
  for (; prepared < layers.size() && status.ok(); ++prepared) {
    status = sequence.rows[layers[prepared]].PrepareAppend(count);
  }
  for (size_t i = 0; i < layers.size() && status.ok(); ++i) {
    status = device_->PrepareAppend(*sequence.model->device(), *sequence.device, layers[i],
                                    sequence.rows[layers[i]].token_count(), count);
  }
  if (status.ok()) status = sequence.ReserveTables(*budget_);
  if (status.ok()) status = sequence.Charge();
  if (!status.ok()) UndoPrepare(sequence, layers.first(prepared));
  return status;
}

void Engine::UndoPrepare(Sequence& sequence, std::span<const int> layers) {
  for (const int layer : layers) sequence.rows[layer].Rollback();
  int64_t longest = 0;
  for (const LayerRows& rows : sequence.rows) longest = std::max(longest, rows.token_count());
  // No layer is longer than this: only the room that was made is given back.
  device_->TruncateSequence(*sequence.model->device(), *sequence.device, longest);
}

void Engine::CountAppend(Sequence& sequence, int64_t row_count) {
  for (WorkCounters* work : {&work_, &sequence.model->work, &sequence.work}) {
    work->appended_row_count.fetch_add(row_count, std::memory_order_relaxed);
  }
}

void Engine::CountAttend(const Job& job, const JobItem& item, Sequence& sequence) {
  AttendSums sums;
  sums.Add(item, sequence.model->spec.group_count());
  CountAttends(sums, ItemTimeUs(job), sequence);
}

void Engine::CountAttends(const AttendSums& sums, double time_us, Sequence& sequence) {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  counters_.certified_errors.Add(sums.certified_error_counts, sums.certified_error_sum);
  if (sums.moved_row_count > 0) {
    counters_.moved_row_count.fetch_add(sums.moved_row_count, kRelaxed);
    counters_.moved_bytes.fetch_add(sums.moved_row_count * sequence.model->spec.row_bytes(),
                                    kRelaxed);
  }
  for (WorkCounters* work : {&work_, &sequence.model->work, &sequence.work}) {
    work->attend_count.fetch_add(sums.attend_count, kRelaxed);
    work->touched_row_count.fetch_add(sums.touched_row_count, kRelaxed);
    work->visible_row_count.fetch_add(sums.visible_row_count, kRelaxed);
    work->attend_time_us.fetch_add(time_us, kRelaxed);
    work->exact_count.fetch_add(sums.exact_count, kRelaxed);
    work->statistical_count.fetch_add(sums.statistical_count, kRelaxed);
    work->none_count.fetch_add(sums.none_count, kRelaxed);
  }
}

}  // namespace spillway

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/account.h"
#include "engine/auditor.h"
#include "engine/device_watch.h"
#include "engine/engine_counters.h"
#include "engine/ordered_queues.h"
#include "engine/presence.h"
#include "engine/registry.h"
#include "engine/requests.h"
#include "engine/slow_attends.h"
#include "engine/store/description.h"
#include "engine/store/store.h"
#include "host/device/device.h"
#include "host/memory/arena.h"

namespace spillway {

struct AttendSums;
class RowCheck;

struct EngineOptions {
  int64_t sequence_count_max = 65536;
  int64_t model_count_max = 4096;
  // The clock of ttl and grace times.
  std::function<SteadyTime()> clock = SteadyNow;
  // An attend of one layer that takes at least so many seconds is recorded as slow; 0: none is.
  double slow_attend_seconds = 0;
  // Checks a share of the attends. Must outlive the engine. Null: no audit.
  Auditor* auditor = nullptr;
  // How long a sequence without a name of its own is kept after all clients that used it have gone
  // (presence.h). Infinite: until its ttl ends.
  absl::Duration unnamed_grace = absl::InfiniteDuration();
  // The seed of models whose policy names none. Empty: random, and the same as long as the store's
  // files exist. Nobody can then choose K/V for which samples say too little.
  std::optional<uint64_t> sampling_seed;
  // The store in which models and sequences outlive the process, beside the arena's file of rows.
  // Must outlive the engine, whose first call must then be Restore(). Null: nothing outlives the
  // process.
  Store* store = nullptr;
  // Called when a device is lost. Null: only the requests that need the device fail.
  DeviceWatch::OnLost device_lost;
};

// A sequence some of whose rows were damaged. Rows up to the damage are kept, in all layers.
struct DamagedRows {
  std::string name;
  int layer = 0;
  int kv_head = -1;              // -1: one of all
  int64_t token_count = 0;       // kept in each layer, at most
  int64_t lost_token_count = 0;  // of the sequence
};

// What Restore() found of an earlier process.
struct RestoreReport {
  int64_t model_count = 0;
  int64_t sequence_count = 0;
  int64_t token_count = 0;
  int64_t row_bytes = 0;  // rows that forks share count once per fork
  // One error for each model, sequence or other record that could not be read and is lost.
  std::vector<absl::Status> lost;
  std::vector<DamagedRows> damaged;
  int64_t checked_bytes = 0;  // of rows, in full pages
  double check_seconds = 0;   // how long that took
};

// Progress of the rebuilding of codes after Restore().
struct RebuildProgress {
  int64_t sequence_count = 0;  // found in the store
  int64_t done_count = 0;      // rebuilt, and served
  int64_t failed_count = 0;    // cannot be served by this process
  int64_t row_bytes = 0;       // rows whose codes are computed
  int64_t lost_count = 0;      // as RestoreReport::lost
  int64_t damaged_count = 0;   // as RestoreReport::damaged
};

// A sequence that was deleted because its time was over.
struct ExpiredSequence {
  enum class Why {
    kIdle,       // nobody used it for its ttl
    kAbandoned,  // its clients are gone, and it has no name of its own
  };
  Why why = Why::kIdle;
  std::string name;
  std::string model_name;
  int64_t token_count = 0;
  absl::Duration idle;
  std::string trace = {};  // trace id of the call that created it; empty: none
};

// Models, sequences, and the operations on them. Operations on one sequence run one after the
// other, in the order of the calls; operations on different sequences run in parallel. A function
// that may wait answers through `done`. It is called exactly once: in the calling thread before the
// call returns, or later in any thread. Requests are validated before they change anything, and a
// request that fails has changed nothing. The engine has no threads of its own, except that of
// a StreamDecoder. Thread-safe.
class Engine {
 public:
  template <typename T>
  using Done = std::function<void(absl::StatusOr<T>)>;

  // All must outlive the engine. The device and the arena charge the same budget.
  Engine(Device* device, Arena* arena, MemoryBudget* budget, EngineOptions options);
  // Stops rebuilding, and waits for operations that were answered but have not ended yet. REQUIRES:
  // no other operation is running.
  ~Engine();

  // Restores what an earlier process left in the store. When this returns, the sequences can be
  // found by name. A sequence is served as soon as its codes are recomputed, which the device's
  // threads do in the background. Then `rebuilt` is called, from any thread, with OK or with the
  // reason why the sequence cannot be served; in that case its rows stay in the store for the next
  // process. Must be the first call, at most once; not thread-safe.
  // FAILED_PRECONDITION if rows lie beyond the arena or if another build wrote the models,
  // RESOURCE_EXHAUSTED if the rows do not fit into the budget. Neither loses data.
  absl::StatusOr<RestoreReport> Restore(
      std::function<void(const Sequence&, const absl::Status&)> rebuilt);
  RebuildProgress rebuild_progress() const;
  // Stops rebuilding, and returns when it has ended. From then on, requests for sequences whose
  // codes are not computed fail with UNAVAILABLE. The rows of these sequences stay in the store.
  void StopRebuilding();

  Device& device() { return *device_; }
  const Device& device() const { return *device_; }
  Arena& arena() { return *arena_; }
  const Arena& arena() const { return *arena_; }
  MemoryBudget& budget() { return *budget_; }
  const MemoryBudget& budget() const { return *budget_; }
  Registry& registry() { return registry_; }
  const Registry& registry() const { return registry_; }
  // Clients that send an id.
  PresenceTable& clients() { return clients_; }
  const PresenceTable& clients() const { return clients_; }
  // The client with this engine id (caller.h); created if it is unknown.
  std::shared_ptr<Presence> ClientOf(std::string_view id) {
    return clients_.Of(id, options_.clock());
  }
  // Called when a connection of the client has ended.
  void ClientGoes(Presence& client) { clients_.Go(client, options_.clock()); }
  // Changes EngineOptions::unnamed_grace, also for existing sequences.
  void SetUnnamedGrace(absl::Duration time) { unnamed_grace_->Set(time); }
  // By the namespace of the sequences' ids.
  AccountTable& accounts() { return accounts_; }
  const WorkCounters& work() const { return work_; }
  const EngineCounters& counters() const { return counters_; }
  SlowAttends& slow_attends() { return slow_attends_; }
  const DeviceWatch& device_watch() const { return device_watch_; }
  // Checks whether the devices are still usable.
  void CheckDevices() { device_watch_.Check(); }
  const Auditor* auditor() const { return options_.auditor; }
  // Identity of the store, the same in every process that opens it; empty without a store.
  // EngineOptions::sampling_seed, or the one that was drawn.
  uint64_t sampling_seed() const { return sampling_seed_; }
  std::string store_id() const {
    return options_.store == nullptr ? "" : options_.store->identity();
  }

  // --- Models. Creating a model and uploading weights may compute for a long time in the calling
  // thread. cancel, which may be null, stops that before the next layer; then nothing is created.

  // REQUIRES: spec is normalised, and policy is valid for it. If the model's hash needs weights,
  // the model is not ready before UploadWeights().
  absl::StatusOr<std::shared_ptr<Model>> CreateModel(const std::string& id, const ModelSpec& spec,
                                                     const Policy& policy,
                                                     const CancelToken* cancel = nullptr);
  // FAILED_PRECONDITION if the model needs no weights or has them already. REQUIRES: the caller
  // holds model.uploading.
  absl::Status UploadWeights(Model& model, std::span<const std::byte> safetensors,
                             const CancelToken* cancel = nullptr);
  // How many more tokens of this model fit into memory. If codes live in the memory of several
  // devices: how many one sequence can have, on the device with the most free memory.
  int64_t FreeTokenCount(const Model& model) const;
  int64_t IndexBytesPerToken(const ModelSpec& spec) const;

  // --- Sequences.

  // ttl is infinite for a sequence that never expires.
  absl::StatusOr<std::shared_ptr<Sequence>> CreateSequence(const std::string& id,
                                                           const std::shared_ptr<Model>& model,
                                                           const Policy& policy, absl::Duration ttl,
                                                           const Origin& origin = {});
  // As CreateSequence(), but the sequence cannot be found by name before ListSequence(). Until then
  // it is freed when the last shared_ptr to it is released.
  absl::StatusOr<std::shared_ptr<Sequence>> MakeSequence(const std::string& id,
                                                         const std::shared_ptr<Model>& model,
                                                         const Policy& policy, absl::Duration ttl,
                                                         const Origin& origin = {});
  // Makes the sequence known by name, and starts its ttl. Errors as Registry::AddSequence().
  absl::Status ListSequence(const std::shared_ptr<Sequence>& sequence);
  // The copy has the first tokens of every layer, up to the length of the shortest layer.
  void Fork(std::shared_ptr<Sequence> source, const std::string& id,
            Done<std::shared_ptr<Sequence>> done, const Origin& origin = {});
  // OUT_OF_RANGE if token_count exceeds the sequence's length.
  void Truncate(std::shared_ptr<Sequence> sequence, int64_t token_count,
                std::function<void(absl::Status)> done);
  // If `sealed`, later appends and truncations are refused; else they are allowed again. The store
  // does not record this.
  void Seal(std::shared_ptr<Sequence> sequence, bool sealed,
            std::function<void(absl::Status)> done);
  // Removes the sequence from the registry at once. Its memory is free when done is called.
  void Delete(std::string_view id, std::function<void(absl::Status)> done);
  // As Delete(), but waits for the sequence's turn, and deletes it only if it is sealed then. Else
  // FAILED_PRECONDITION, reason SEQUENCE_NOT_SEALED.
  void DeleteSealed(std::string_view id, std::function<void(absl::Status)> done);
  // Deletes the expired sequences on which no operation runs or waits, and returns what they were.
  std::vector<ExpiredSequence> SweepExpired();

  // --- K/V and attention. The caller must call CheckFinite() first, except for chunks with a
  // shared source.

  void Append(AppendRequest request, Done<AppendOutcome> done);
  // Validates all items, then serves them as one job. An error of the whole request names the item.
  void Attend(AttendRequest request, Done<AttendOutcome> done);
  // Shares the rows of one layer, as they are when the request's turn comes.
  void ShareRows(std::shared_ptr<Sequence> sequence, int layer, Done<SharedRows> done);
  // The same for all layers, up to the length of the shortest layer.
  void ShareSequence(std::shared_ptr<Sequence> sequence, Done<SharedSequence> done);

 private:
  class AppendOperation;
  class AttendOperation;
  class SimpleOperation;
  class HoldOperation;
  class RebuildOperation;
  class ShareCodesOperation;
  class Rebuilder;
  friend class StreamDecoder;

  // Calls `run` when the sequence's turn comes. `run` must not wait.
  void RunInTurn(std::shared_ptr<Sequence> sequence, std::function<void(Sequence&)> run);
  // Waits for the turn of the sequences. Until Release(), requests for them are refused.
  // FAILED_PRECONDITION if one of them is held already.
  absl::StatusOr<std::shared_ptr<HoldOperation>> Hold(
      std::vector<std::shared_ptr<Sequence>> sequences);
  void Release(HoldOperation& hold);
  absl::StatusOr<std::shared_ptr<Sequence>> ForkNow(Sequence& source, const std::string& id,
                                                    const Origin& origin);
  // Makes room for `count` tokens at the end of each of these layers. An error leaves everything as
  // it was.
  absl::Status PrepareAppend(Sequence& sequence, std::span<const int> layers, int64_t count);
  // Gives back the room that was made in these layers and is not in use, in the host and on the
  // device. The sequence's account is settled by the next Publish().
  void UndoPrepare(Sequence& sequence, std::span<const int> layers);
  // Creates a model without weights and record, which is not in the registry.
  absl::StatusOr<std::shared_ptr<Model>> MakeModel(const std::string& id, const ModelSpec& spec,
                                                   const Policy& policy, absl::Time create_time);
  // Creates the sequence's record if there is a store. source: the sequence whose full pages it
  // shares; null: it has none.
  absl::Status Record(Sequence& sequence, const Sequence* source);
  // The parts of Restore(). CheckRows() compares all rows with their checksums, before anything is
  // served, and cuts sequences before the first damage and where an earlier process began to.
  absl::Status RestoreModels(RestoreReport& report);
  void CheckRows(std::span<const std::shared_ptr<Sequence>> sequences, RestoreReport& report);
  static std::optional<DamagedRows> CutDamage(Sequence& sequence, const RowCheck& check);
  // Recreates a sequence from its record, on the device but without codes.
  absl::StatusOr<std::shared_ptr<Sequence>> Adopt(StoredSequence description,
                                                  const std::shared_ptr<Model>& model,
                                                  std::unique_ptr<SequenceRecord> record);
  void CountAttend(const Job& job, const JobItem& item, Sequence& sequence);
  // The same for what was attended of a sequence in one or several jobs. time_us: its part of the
  // device's time.
  void CountAttends(const AttendSums& sums, double time_us, Sequence& sequence);
  // Called when an item has ended on the device with this status.
  void NoteEnded(const Sequence& sequence, const absl::Status& status) {
    device_watch_.Note(device_->HomeOf(*sequence.device), status);
  }
  void CountAppend(Sequence& sequence, int64_t row_count);
  void Renew(Sequence& sequence) { sequence.Renew(options_.clock()); }

  Device* const device_;
  Arena* const arena_;
  MemoryBudget* const budget_;
  const EngineOptions options_;
  const std::shared_ptr<UnnamedGrace> unnamed_grace_ =
      std::make_shared<UnnamedGrace>(options_.unnamed_grace);
  const uint64_t sampling_seed_;
  OrderedQueues queues_;
  WorkCounters work_;
  EngineCounters counters_;
  SlowAttends slow_attends_;
  DeviceWatch device_watch_;
  AccountTable accounts_;
  PresenceTable clients_;
  Registry registry_;
  const std::unique_ptr<Rebuilder> rebuilder_;
};

}  // namespace spillway

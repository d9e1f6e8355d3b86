#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/engine/account.h"
#include "daemon/engine/auditor.h"
#include "daemon/engine/device_watch.h"
#include "daemon/engine/engine_counters.h"
#include "daemon/engine/ordered_queues.h"
#include "daemon/engine/presence.h"
#include "daemon/engine/registry.h"
#include "daemon/engine/requests.h"
#include "daemon/engine/slow_attends.h"
#include "daemon/store/description.h"
#include "daemon/store/store.h"
#include "host/device/device.h"
#include "host/memory/arena.h"

namespace spillway {

struct EngineOptions {
  int64_t sequence_count_max = 65536;
  int64_t model_count_max = 4096;
  std::function<absl::Time()> clock = absl::Now;
  // From how many seconds on a request to attend at a layer is noted down as slow; 0: none is.
  double slow_attend_seconds = 0;
  // Checks attends; outlives what runs. Null: none.
  Auditor* auditor = nullptr;
  // How long a sequence that no client has named stays once all clients that used it are gone
  // (presence.h); infinite: until its ttl.
  absl::Duration unnamed_grace = absl::InfiniteDuration();
  // Where models and sequences outlive the process, with the arena's file of rows; outlives the
  // engine, which begins with Restore(). Null: nowhere.
  Store* store = nullptr;
  // What happens where a device is lost. Null: what is asked of it fails.
  DeviceWatch::OnLost device_lost;
};

// What an engine found that a process before it had left.
struct RestoreReport {
  int64_t model_count = 0;
  int64_t sequence_count = 0;
  int64_t token_count = 0;
  int64_t row_bytes = 0;  // forks share some
  // What could not be read, which is gone.
  std::vector<absl::Status> lost;
};

// How far codes have been made anew.
struct RebuildProgress {
  int64_t sequence_count = 0;  // all that were found
  int64_t done_count = 0;      // that are served
  int64_t failed_count = 0;    // that are not, and will not be
  int64_t row_bytes = 0;       // whose codes are made
};

// A sequence that has gone by itself.
struct ExpiredSequence {
  enum class Why {
    kIdle,       // nobody used it for its ttl
    kAbandoned,  // its clients are gone, and nobody has named it
  };
  Why why = Why::kIdle;
  std::string name;
  std::string model_name;
  int64_t token_count = 0;
  absl::Duration idle;
  std::string trace = {};  // of the call that made it; empty where it did not say
};

// Models, sequences and what is done to them. Operations on one sequence run
// one after the other in the order they came, different sequences in parallel.
// Whatever may wait answers through `done`, called once, from the calling
// thread before the call returns or from any thread later; requests are
// validated before they change anything, and one that fails has changed
// nothing. No threads of its own. Thread-safe.
class Engine {
 public:
  template <typename T>
  using Done = std::function<void(absl::StatusOr<T>)>;

  // All outlive the engine. The device and the arena charge the same budget.
  Engine(Device* device, Arena* arena, MemoryBudget* budget, EngineOptions options);
  // Waits for the end of what has been answered. REQUIRES: nothing else is running but rebuilding.
  ~Engine();

  // Finds what a process before this one left in the store. Sequences can be named from then on;
  // each is served as soon as its codes are made anew, which the device's threads do meanwhile
  // and tell `rebuilt` of, from any thread: OK, or why it cannot be served. Its rows stay in the
  // store then, for the next process. First of all calls, once; not thread-safe.
  // FAILED_PRECONDITION where rows lie beyond the arena, RESOURCE_EXHAUSTED where they do not
  // fit into the budget: nothing is lost then.
  absl::StatusOr<RestoreReport> Restore(
      std::function<void(const Sequence&, const absl::Status&)> rebuilt);
  RebuildProgress rebuild_progress() const;
  // Sequences whose codes are not made yet fail with UNAVAILABLE; returns when nothing is
  // rebuilt any more. Their rows stay in the store.
  void StopRebuilding();

  Device& device() { return *device_; }
  const Device& device() const { return *device_; }
  Arena& arena() { return *arena_; }
  const Arena& arena() const { return *arena_; }
  MemoryBudget& budget() { return *budget_; }
  const MemoryBudget& budget() const { return *budget_; }
  Registry& registry() { return registry_; }
  const Registry& registry() const { return registry_; }
  // The clients that say who they are.
  PresenceTable& clients() { return clients_; }
  const PresenceTable& clients() const { return clients_; }
  // That of the engine's id.
  std::shared_ptr<Presence> ClientOf(std::string_view id) {
    return clients_.Of(id, options_.clock());
  }
  // A connection of the client's has ended.
  void ClientGoes(Presence& client) { clients_.Go(client, options_.clock()); }
  // As EngineOptions::unnamed_grace, also of sequences that are there.
  void SetUnnamedGrace(absl::Duration time) { unnamed_grace_->Set(time); }
  // By the namespace of ids.
  AccountTable& accounts() { return accounts_; }
  const WorkCounters& work() const { return work_; }
  const EngineCounters& counters() const { return counters_; }
  SlowAttends& slow_attends() { return slow_attends_; }
  const DeviceWatch& device_watch() const { return device_watch_; }
  // Looks whether the devices are usable still.
  void CheckDevices() { device_watch_.Check(); }
  const Auditor* auditor() const { return options_.auditor; }
  // Of the store, the same for every process that opens it; empty without one.
  std::string store_id() const {
    return options_.store == nullptr ? "" : options_.store->identity();
  }

  // --- Models. These may compute for long in the calling thread; cancel, which may be null, ends
  // that within a layer, and then nothing is created.

  // spec is normalised and policy valid for it. A model whose hash needs
  // weights waits for UploadWeights.
  absl::StatusOr<std::shared_ptr<Model>> CreateModel(const std::string& id, const ModelSpec& spec,
                                                     const Policy& policy,
                                                     const CancelToken* cancel = nullptr);
  // FAILED_PRECONDITION for a model that needs none or has them. REQUIRES: the
  // caller holds model.uploading.
  absl::Status UploadWeights(Model& model, std::span<const std::byte> safetensors,
                             const CancelToken* cancel = nullptr);
  // Tokens of this model that fit before admission refuses: where codes live
  // in the memory of several devices, those that one sequence can have, on the
  // device with the most free.
  int64_t FreeTokenCount(const Model& model) const;
  int64_t IndexBytesPerToken(const ModelSpec& spec) const;

  // --- Sequences.

  // ttl is infinite for a sequence that never expires.
  absl::StatusOr<std::shared_ptr<Sequence>> CreateSequence(const std::string& id,
                                                           const std::shared_ptr<Model>& model,
                                                           const Policy& policy, absl::Duration ttl,
                                                           const Origin& origin = {});
  // The same of a sequence that nothing can name until ListSequence; it goes with its last
  // holder.
  absl::StatusOr<std::shared_ptr<Sequence>> MakeSequence(const std::string& id,
                                                         const std::shared_ptr<Model>& model,
                                                         const Policy& policy, absl::Duration ttl,
                                                         const Origin& origin = {});
  // Errors as Registry::AddSequence. Its time to live begins.
  absl::Status ListSequence(const std::shared_ptr<Sequence>& sequence);
  // The copy has every layer's first tokens, up to the shortest's length.
  void Fork(std::shared_ptr<Sequence> source, const std::string& id,
            Done<std::shared_ptr<Sequence>> done, const Origin& origin = {});
  // OUT_OF_RANGE if token_count is above the sequence's.
  void Truncate(std::shared_ptr<Sequence> sequence, int64_t token_count,
                std::function<void(absl::Status)> done);
  // From then on no rows are appended or truncated, or they are again. Not recorded in the store.
  void Seal(std::shared_ptr<Sequence> sequence, bool sealed,
            std::function<void(absl::Status)> done);
  // Gone from the list at once; its memory is free when done is called.
  void Delete(std::string_view id, std::function<void(absl::Status)> done);
  // The same in its turn, of one that is sealed then; else FAILED_PRECONDITION, reason
  // SEQUENCE_NOT_SEALED.
  void DeleteSealed(std::string_view id, std::function<void(absl::Status)> done);
  // Deletes what has expired, and tells what that was.
  std::vector<ExpiredSequence> SweepExpired();

  // --- K/V and attention. CheckFinite() is the caller's to do before, for all
  // but chunks with a shared source.

  void Append(AppendRequest request, Done<AppendOutcome> done);
  // All items are validated, then all are served as one job. An error of the
  // whole request names the item.
  void Attend(AttendRequest request, Done<AttendOutcome> done);
  // Shares one layer's rows as they are when the request's turn comes.
  void ShareRows(std::shared_ptr<Sequence> sequence, int layer, Done<SharedRows> done);
  // The same of all layers, up to the shortest's length.
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

  // Runs `run` when the sequence's turn comes; it must not wait.
  void RunInTurn(std::shared_ptr<Sequence> sequence, std::function<void(Sequence&)> run);
  // Waits until the sequences' turn comes; no request of theirs is taken until
  // Release(). FAILED_PRECONDITION if one is held already.
  absl::StatusOr<std::shared_ptr<HoldOperation>> Hold(
      std::vector<std::shared_ptr<Sequence>> sequences);
  void Release(HoldOperation& hold);
  absl::StatusOr<std::shared_ptr<Sequence>> ForkNow(Sequence& source, const std::string& id,
                                                    const Origin& origin);
  // Makes room for `count` tokens at each layer's length; on failure nothing
  // is left of it.
  absl::Status PrepareAppend(Sequence& sequence, std::span<const int> layers, int64_t count);
  // Without weights, record and name.
  absl::StatusOr<std::shared_ptr<Model>> MakeModel(const std::string& id, const ModelSpec& spec,
                                                   const Policy& policy, absl::Time create_time);
  // Makes the sequence's record, where there is a store.
  absl::Status Record(Sequence& sequence);
  // A sequence as its record has it, on the device, without codes.
  absl::StatusOr<std::shared_ptr<Sequence>> Adopt(StoredSequence description,
                                                  const std::shared_ptr<Model>& model,
                                                  std::unique_ptr<SequenceRecord> record);
  void CountAttend(const Job& job, const JobItem& item, Sequence& sequence);
  // An item has ended on the device, with this status.
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

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
#include "daemon/engine/auditor.h"
#include "daemon/engine/ordered_queues.h"
#include "daemon/engine/registry.h"
#include "daemon/engine/requests.h"
#include "host/device/device.h"
#include "host/memory/arena.h"

namespace spillway {

struct EngineOptions {
  int64_t sequence_count_max = 65536;
  int64_t model_count_max = 4096;
  std::function<absl::Time()> clock = absl::Now;
  // Checks attends; outlives what runs. Null: none.
  Auditor* auditor = nullptr;
};

// A sequence that nobody used for its ttl.
struct ExpiredSequence {
  std::string name;
  std::string model_name;
  int64_t token_count = 0;
  absl::Duration idle;
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
  // REQUIRES: nothing is running.
  ~Engine();

  Device& device() { return *device_; }
  Arena& arena() { return *arena_; }
  MemoryBudget& budget() { return *budget_; }
  Registry& registry() { return registry_; }
  const Registry& registry() const { return registry_; }
  const WorkCounters& work() const { return work_; }
  const Auditor* auditor() const { return options_.auditor; }

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
                                                           const Policy& policy,
                                                           absl::Duration ttl);
  // The same of a sequence that nothing can name until ListSequence; it goes with its last
  // holder.
  absl::StatusOr<std::shared_ptr<Sequence>> MakeSequence(const std::string& id,
                                                         const std::shared_ptr<Model>& model,
                                                         const Policy& policy, absl::Duration ttl);
  // Errors as Registry::AddSequence. Its time to live begins.
  absl::Status ListSequence(const std::shared_ptr<Sequence>& sequence);
  // The copy has every layer's first tokens, up to the shortest's length.
  void Fork(std::shared_ptr<Sequence> source, const std::string& id,
            Done<std::shared_ptr<Sequence>> done);
  // OUT_OF_RANGE if token_count is above the sequence's.
  void Truncate(std::shared_ptr<Sequence> sequence, int64_t token_count,
                std::function<void(absl::Status)> done);
  // Gone from the list at once; its memory is free when done is called.
  void Delete(std::string_view id, std::function<void(absl::Status)> done);
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
  friend class StreamDecoder;

  // Runs `run` when the sequence's turn comes; it must not wait.
  void RunInTurn(std::shared_ptr<Sequence> sequence, std::function<void(Sequence&)> run);
  // Waits until the sequences' turn comes; no request of theirs is taken until
  // Release(). FAILED_PRECONDITION if one is held already.
  absl::StatusOr<std::shared_ptr<HoldOperation>> Hold(
      std::vector<std::shared_ptr<Sequence>> sequences);
  void Release(HoldOperation& hold);
  absl::StatusOr<std::shared_ptr<Sequence>> ForkNow(Sequence& source, const std::string& id);
  // Makes room for `count` tokens at each layer's length; on failure nothing
  // is left of it.
  absl::Status PrepareAppend(Sequence& sequence, std::span<const int> layers, int64_t count);
  void CountAttend(const Job& job, const JobItem& item, Sequence& sequence);
  void CountAppend(Sequence& sequence, int64_t row_count);
  void Renew(Sequence& sequence) { sequence.Renew(options_.clock()); }

  Device* const device_;
  Arena* const arena_;
  MemoryBudget* const budget_;
  const EngineOptions options_;
  OrderedQueues queues_;
  WorkCounters work_;
  Registry registry_;
};

}  // namespace spillway

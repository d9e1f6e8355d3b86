#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "engine/account.h"
#include "engine/model.h"
#include "engine/ordered_queues.h"
#include "engine/presence.h"
#include "host/base/mutex.h"
#include "host/base/steady_time.h"
#include "host/memory/layer_rows.h"
#include "host/memory/sequence_record.h"

namespace spillway {

// State of a sequence that can be read while operations on it run.
struct SequenceSnapshot {
  std::vector<int64_t> layer_token_counts;
  int64_t token_count = 0;  // the shortest layer's
  int64_t generation = 0;
  int64_t row_bytes = 0;
  int64_t index_bytes = 0;
  bool sealed = false;
};

// How a sequence was created, which decides how long it is kept without its clients.
struct Origin {
  // Whether a client chose its id, and so may ask for it again.
  bool named = true;
  // The client that created it; null: unknown.
  std::shared_ptr<Presence> client;
  // Trace id of the call that created it (Caller::trace()); empty: none.
  std::string trace = {};
};

// The K/V of one text. Its contents (rows, device, generation) belong to the operation at the head
// of its queue. The snapshot is updated by Publish(), and can be read at any time.
class Sequence {
 public:
  // account: charged with the bytes that it holds. grace: how long unnamed sequences are kept
  // without clients. now: its ttl begins. REQUIRES: the model is ready.
  Sequence(std::string id, std::shared_ptr<Model> model, std::shared_ptr<Account> account,
           const Policy& policy, absl::Duration ttl, absl::Time create_time, SteadyTime now,
           const Origin& origin, std::shared_ptr<const UnnamedGrace> grace);
  ~Sequence();
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  // Bytes of its tables before the first append.
  static int64_t TableBytes(const ModelSpec& spec);

  const std::string id;    // the engine's, with its namespace
  const std::string name;  // "sequences/{id}" with the client's id
  const std::shared_ptr<Model> model;
  const std::shared_ptr<Account> account;
  const Policy policy;
  const absl::Duration ttl;      // infinite: never expires
  const bool named;              // as Origin::named
  const std::string client;      // engine's id of the client that created it; empty: unknown
  const std::string trace;       // as Origin::trace
  const absl::Time create_time;  // a date, for people: the wall clock may have been set since
  WorkCounters work;

  // --- Time; thread-safe.
  void Renew(SteadyTime now) { last_use_.store(now, std::memory_order_relaxed); }
  SteadyTime last_use_time() const { return last_use_.load(std::memory_order_relaxed); }
  // Records that a client uses it. Null: a client without an id, which never counts as gone.
  void Use(const std::shared_ptr<Presence>& client) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether it is unnamed and all clients that used it are gone.
  bool abandoned() const ABSL_LOCKS_EXCLUDED(mutex_);
  // When its ttl ends; kNever if it has none.
  SteadyTime idle_end() const { return After(last_use_time(), ttl); }
  // When its grace time ends; kNever unless it is abandoned.
  SteadyTime grace_end() const ABSL_LOCKS_EXCLUDED(mutex_);
  // The earlier of the two.
  SteadyTime expire_time() const { return std::min(idle_end(), grace_end()); }

  SequenceSnapshot snapshot() const;

  // Whether a decoder on a stream holds it. Requests are refused then. Thread-safe.
  std::atomic<bool> held = false;

  // --- Contents: for the operation at the head of `queue`.
  OrderedQueues::Queue queue;
  // The record that outlives the process; null without a store. The registry lists it.
  std::unique_ptr<SequenceRecord> record;
  std::vector<LayerRows> rows;  // per layer; empty once deleted
  std::unique_ptr<DeviceSequence> device;
  int64_t generation = 0;
  // Whether appends and truncations are refused, see CheckOpen().
  bool sealed = false;

  // Why it cannot be served, if an earlier process left it; else OK.
  absl::Status failure;

  bool deleted() const { return rows.empty(); }
  // NOT_FOUND if it is deleted, else `failure`.
  absl::Status Check() const;
  // The same for appends and truncations: also FAILED_PRECONDITION, reason SEQUENCE_SEALED.
  absl::Status CheckOpen() const;
  // Length of the shortest layer.
  int64_t token_count() const;
  // Reserves memory for page tables that have grown. RESOURCE_EXHAUSTED.
  absl::Status ReserveTables(MemoryBudget& budget);
  // Charges the account with the bytes by which it has grown. RESOURCE_EXHAUSTED leaves the charge
  // as it was.
  absl::Status Charge();
  // Frees all pages and tables.
  void Clear();
  // Updates the snapshot and the account from the contents.
  void Publish();
  // The same from the record, while the contents do not have its tokens yet.
  void PublishRecord();

 private:
  void Settle(int64_t held_bytes);

  std::vector<MemoryReservation> table_reservations_;
  int64_t charged_bytes_ = 0;  // to the account
  bool counted_ = true;        // in model->sequence_count
  const std::shared_ptr<const UnnamedGrace> grace_;
  std::atomic<SteadyTime> last_use_;
  mutable Mutex mutex_;
  SequenceUsers users_ ABSL_GUARDED_BY(mutex_);
  SequenceSnapshot snapshot_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway

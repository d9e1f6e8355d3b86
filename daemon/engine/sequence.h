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
#include "daemon/engine/account.h"
#include "daemon/engine/model.h"
#include "daemon/engine/ordered_queues.h"
#include "daemon/engine/presence.h"
#include "host/base/mutex.h"
#include "host/memory/layer_rows.h"
#include "host/memory/sequence_record.h"

namespace spillway {

// What can be told of a sequence while operations on it run.
struct SequenceSnapshot {
  std::vector<int64_t> layer_token_counts;
  int64_t token_count = 0;  // the shortest layer's
  int64_t generation = 0;
  int64_t row_bytes = 0;
  int64_t index_bytes = 0;
  bool sealed = false;
};

// Where a sequence comes from, which decides how long it stays without its clients.
struct Origin {
  // Whether a client chose its id, and may so come for it again.
  bool named = true;
  // Who made it; null where that was not said.
  std::shared_ptr<Presence> client;
  // By what its client's tracing knows the call (Caller::trace()); empty where it does not say.
  std::string trace = {};
};

// The K/V of one context. Its contents (rows, device, generation) belong to
// the operation that heads its queue; the snapshot follows them and can be read
// at any time.
class Sequence {
 public:
  // account: charged with what it holds. grace: of those that are not named.
  // REQUIRES: a ready model.
  Sequence(std::string id, std::shared_ptr<Model> model, std::shared_ptr<Account> account,
           const Policy& policy, absl::Duration ttl, absl::Time create_time, const Origin& origin,
           std::shared_ptr<const UnnamedGrace> grace);
  ~Sequence();
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  // Bytes of its tables before a token is appended.
  static int64_t TableBytes(const ModelSpec& spec);

  const std::string id;    // the engine's, with its namespace
  const std::string name;  // its client's
  const std::shared_ptr<Model> model;
  const std::shared_ptr<Account> account;
  const Policy policy;
  const absl::Duration ttl;  // infinite: never expires
  const bool named;          // as Origin::named
  const std::string client;  // the engine's id of who made it; empty where that was not said
  const std::string trace;   // as Origin::trace
  const absl::Time create_time;
  WorkCounters work;

  // --- Time; thread-safe.
  void Renew(absl::Time now) {
    last_use_ns_.store(absl::ToUnixNanos(now), std::memory_order_relaxed);
  }
  absl::Time last_use_time() const {
    return absl::FromUnixNanos(last_use_ns_.load(std::memory_order_relaxed));
  }
  // A client uses it; null: one that does not say who it is, and so never goes.
  void Use(const std::shared_ptr<Presence>& client) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether it is not named and all that used it are gone.
  bool abandoned() const ABSL_LOCKS_EXCLUDED(mutex_);
  // When it goes by its ttl; infinite for never.
  absl::Time idle_end() const { return last_use_time() + ttl; }
  // When it goes for want of a client; infinite unless it is abandoned.
  absl::Time grace_end() const ABSL_LOCKS_EXCLUDED(mutex_);
  // The earlier of the two.
  absl::Time expire_time() const { return std::min(idle_end(), grace_end()); }

  SequenceSnapshot snapshot() const;

  // Whether a decoder on a stream holds it: no request is taken then. Thread-safe.
  std::atomic<bool> held = false;

  // --- Contents: for the operation at the head of `queue`.
  OrderedQueues::Queue queue;
  // What outlives the process; null where nothing does. Listed by the registry.
  std::unique_ptr<SequenceRecord> record;
  std::vector<LayerRows> rows;  // per layer; empty once deleted
  std::unique_ptr<DeviceSequence> device;
  int64_t generation = 0;
  // Whether its rows stay as they are, see CheckOpen().
  bool sealed = false;

  // Why it cannot be served, of one that an earlier process left.
  absl::Status failure;

  bool deleted() const { return rows.empty(); }
  // NOT_FOUND once deleted, or its failure.
  absl::Status Check() const;
  // The same for what appends or truncates: also FAILED_PRECONDITION, reason SEQUENCE_SEALED.
  absl::Status CheckOpen() const;
  // The shortest layer's length.
  int64_t token_count() const;
  // Charges what the page tables have grown by. RESOURCE_EXHAUSTED.
  absl::Status ReserveTables(MemoryBudget& budget);
  // Charges the account with what it has grown by. RESOURCE_EXHAUSTED: it is charged as before.
  absl::Status Charge();
  // Gives every page and table back.
  void Clear();
  // Lets the snapshot, and the account, follow the contents.
  void Publish();
  // Lets it follow the record, for as long as the contents do not.
  void PublishRecord();

 private:
  void Settle(int64_t held_bytes);

  std::vector<MemoryReservation> table_reservations_;
  int64_t charged_bytes_ = 0;  // to the account
  bool counted_ = true;        // in model->sequence_count
  const std::shared_ptr<const UnnamedGrace> grace_;
  std::atomic<int64_t> last_use_ns_;
  mutable Mutex mutex_;
  SequenceUsers users_ ABSL_GUARDED_BY(mutex_);
  SequenceSnapshot snapshot_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway

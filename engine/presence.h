#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "host/base/mutex.h"
#include "host/base/steady_time.h"

namespace spillway {

// A client that sends an id, and whether it is connected. Thread-safe.
class Presence {
 public:
  // Not connected, and gone since `gone`. id: the engine's id, with its namespace.
  Presence(std::string id, SteadyTime gone) : id(std::move(id)), gone_(gone) {}

  const std::string id;

  // When its last connection ended, or, if it never connected, when its id was first seen; kNever
  // while it is connected.
  SteadyTime gone_time() const { return gone_.load(std::memory_order_relaxed); }

 private:
  friend class PresenceTable;
  int64_t connection_count_ = 0;  // guarded by the table's mutex
  std::atomic<SteadyTime> gone_;
};

// How long an unnamed sequence is kept after all clients that used it have gone. May change while
// sequences exist. Thread-safe.
class UnnamedGrace {
 public:
  // If time is infinite, the sequence is kept until its ttl ends.
  explicit UnnamedGrace(absl::Duration time) { Set(time); }
  void Set(absl::Duration time) {
    // An infinite duration becomes INT64_MAX.
    ns_.store(absl::ToInt64Nanoseconds(time), std::memory_order_relaxed);
  }
  absl::Duration time() const {
    const int64_t ns = ns_.load(std::memory_order_relaxed);
    return ns == INT64_MAX ? absl::InfiniteDuration() : absl::Nanoseconds(ns);
  }

 private:
  std::atomic<int64_t> ns_;
};

// The clients that are connected, and those that sequences refer to. A client that connects again
// with its id is the same client. Thread-safe.
class PresenceTable {
 public:
  // The client with this id; if it is unknown, a new one, gone since `now`.
  std::shared_ptr<Presence> Of(std::string_view id, SteadyTime now) ABSL_LOCKS_EXCLUDED(mutex_);
  // A connection of the client has begun (Come) or ended (Go).
  void Come(Presence& client) ABSL_LOCKS_EXCLUDED(mutex_);
  void Go(Presence& client, SteadyTime now) ABSL_LOCKS_EXCLUDED(mutex_);
  // From now on no client counts as gone: connections end because the daemon ends.
  void Freeze() ABSL_LOCKS_EXCLUDED(mutex_);
  // Number of connected clients.
  int64_t there_count() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  mutable Mutex mutex_;
  // Connections and sequences own the clients. Keys are the clients' ids.
  absl::flat_hash_map<std::string, std::weak_ptr<Presence>> clients_ ABSL_GUARDED_BY(mutex_);
  size_t cleared_count_ ABSL_GUARDED_BY(mutex_) = 0;  // entries that the last clean-up left
  int64_t there_count_ ABSL_GUARDED_BY(mutex_) = 0;
  bool frozen_ ABSL_GUARDED_BY(mutex_) = false;
};

// Which clients have used a sequence, and when the last of them went. Not thread-safe.
class SequenceUsers {
 public:
  // Adds a client. Null: a client without an id, which never counts as gone.
  void Note(const std::shared_ptr<Presence>& client);
  // When the last of them went; kNever while one is connected or may be, SteadyTime::min() if no
  // client has used the sequence.
  SteadyTime gone_time() const;

 private:
  // Gone clients that are remembered, at most. Beyond that, the one that went first is forgotten:
  // if it comes back, it must use the sequence by name to count again.
  static constexpr size_t kGoneCountMax = 16;

  bool unknown_ = false;
  SteadyTime forgotten_ = SteadyTime::min();  // when the last forgotten client went
  std::vector<std::shared_ptr<Presence>> clients_;
};

}  // namespace spillway

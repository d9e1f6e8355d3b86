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

namespace spillway {

// A client that says who it is, and whether it is there. Thread-safe.
class Presence {
 public:
  // Gone since then. id: the engine's, with its namespace.
  Presence(std::string id, absl::Time gone)
      : id(std::move(id)), gone_ns_(absl::ToUnixNanos(gone)) {}

  const std::string id;

  // When it went, or was heard of first without being there; infinite while it is there.
  absl::Time gone_time() const {
    const int64_t ns = gone_ns_.load(std::memory_order_relaxed);
    return ns == kThere ? absl::InfiniteFuture() : absl::FromUnixNanos(ns);
  }

 private:
  friend class PresenceTable;
  static constexpr int64_t kThere = INT64_MAX;

  int64_t connection_count_ = 0;  // by the table's lock
  std::atomic<int64_t> gone_ns_;
};

// How long a sequence that no client has named stays once all that used it are gone; it may change
// while sequences are there. Thread-safe.
class UnnamedGrace {
 public:
  // time: infinite: until the sequence's ttl.
  explicit UnnamedGrace(absl::Duration time) { Set(time); }
  void Set(absl::Duration time) {
    // An infinite one is the most there is.
    ns_.store(absl::ToInt64Nanoseconds(time), std::memory_order_relaxed);
  }
  absl::Duration time() const {
    const int64_t ns = ns_.load(std::memory_order_relaxed);
    return ns == INT64_MAX ? absl::InfiniteDuration() : absl::Nanoseconds(ns);
  }

 private:
  std::atomic<int64_t> ns_;
};

// The clients that are there, and those whose going matters to a sequence. A client that comes
// again under its id is the one that it was. Thread-safe.
class PresenceTable {
 public:
  // That of the id, heard of first `now` unless it is known.
  std::shared_ptr<Presence> Of(std::string_view id, absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);
  // One more connection says that the client is there, or one fewer.
  void Come(Presence& client) ABSL_LOCKS_EXCLUDED(mutex_);
  void Go(Presence& client, absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);
  // From now on nobody goes: connections end because the daemon does.
  void Freeze() ABSL_LOCKS_EXCLUDED(mutex_);
  // That are there.
  int64_t there_count() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  mutable Mutex mutex_;
  // Held by their connections and sequences. Keys are the presences' own ids.
  absl::flat_hash_map<std::string, std::weak_ptr<Presence>> clients_ ABSL_GUARDED_BY(mutex_);
  size_t cleared_count_ ABSL_GUARDED_BY(mutex_) = 0;  // entries after the last clearing
  int64_t there_count_ ABSL_GUARDED_BY(mutex_) = 0;
  bool frozen_ ABSL_GUARDED_BY(mutex_) = false;
};

// Which clients have used a sequence, and since when none of them is there. Not thread-safe.
class SequenceUsers {
 public:
  // Null: a client that does not say who it is, and so never goes.
  void Note(const std::shared_ptr<Presence>& client);
  // When the last of them went; infinite while one is there or may be, and the infinite past
  // where nobody has used it.
  absl::Time gone_time() const;

 private:
  // Beyond it those that went first are forgotten: they would have to come again, and name the
  // sequence, to be its users.
  static constexpr size_t kGoneCountMax = 16;

  bool unknown_ = false;
  absl::Time forgotten_ = absl::InfinitePast();  // when the last that is forgotten went
  std::vector<std::shared_ptr<Presence>> clients_;
};

}  // namespace spillway

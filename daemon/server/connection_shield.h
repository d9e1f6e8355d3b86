#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "daemon/server/frame_counter.h"
#include "host/base/mutex.h"

struct ssl_st;

namespace spillway {

// Ends connections whose clients make gRPC hold memory that no setting limits, before gRPC sees
// what they sent (docs/adr/0056). gRPC's reads pass through daemon/server/shielded_reads.cc, which
// shows their bytes to the shield. Only connections that the daemon itself has accepted are
// watched. There is one shield for the process. Thread-safe.
class ConnectionShield {
 public:
  using Clock = FrameCounter::Clock;

  // From its acceptance on, a connection must have acknowledged the server's SETTINGS by then, for
  // which a gRPC client needs two round trips, and four with TLS.
  static constexpr std::chrono::seconds kGreetingMax{30};

  // A watched connection.
  struct Connection {
    Connection(int fd, int early_stream_count_max) : fd(fd), frames(early_stream_count_max) {}

    const int fd;
    const Clock::time_point accepted = Clock::now();
    std::atomic<bool> is_tls{false};
    std::atomic<bool> acknowledged{false};
    std::atomic<bool> ended{false};
    std::atomic<int64_t> recent_stream_count{0};
    FrameCounter frames;  // for the thread that reads
  };

  // A connection that was ended.
  struct Ended {
    std::string peer;
    std::string reason;
  };

  static ConnectionShield& Get();

  // Watches connections from now on. REQUIRES: gRPC's reads are shielded.
  void Enable(int early_stream_count_max);
  bool enabled() const { return early_stream_count_max_ != 0; }

  // While this exists, the TLS sessions that its thread creates belong to the connection. Made
  // before an accepted connection is passed to gRPC, in the thread that passes it.
  class Admission {
   public:
    explicit Admission(int fd);
    ~Admission();
    Admission(const Admission&) = delete;
    Admission& operator=(const Admission&) = delete;
  };

  // For the reads. Null if the descriptor is not a watched connection. The connection lives until
  // the descriptor is closed.
  static Connection* Find(int fd);
  // The same for OpenSSL's handle of a TLS session.
  static Connection* FindSession(const ssl_st* session);
  // Bytes of HTTP/2 that were read from a connection. False if it has been ended, so that the bytes
  // must not be passed on. Called by one thread at a time for each connection.
  bool Take(Connection& connection, std::string_view bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // The descriptor is about to be closed.
  void Forget(Connection& connection) ABSL_LOCKS_EXCLUDED(mutex_);

  // Ends connections that have taken longer than kGreetingMax. Called about once per second.
  void EndSilent(Clock::time_point now) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends the connection that has opened most streams in the last seconds. False if there is none.
  bool EndBusiest(const std::string& reason) ABSL_LOCKS_EXCLUDED(mutex_);
  // Connections ended since the start, and some of those since the last call.
  int64_t ended_count() const { return ended_count_; }
  std::vector<Ended> TakeEnded() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  ConnectionShield() = default;
  void End(Connection& connection, std::string reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::atomic<int> early_stream_count_max_{0};  // 0: not enabled
  std::atomic<int64_t> ended_count_{0};
  Mutex mutex_;
  std::unordered_map<int, std::shared_ptr<Connection>> open_ ABSL_GUARDED_BY(mutex_);
  std::vector<Ended> ended_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/config/config.h"
#include "host/device/device.h"

namespace spillway {

// Asks, starts and ends a control daemon of CUDA MPS.
inline constexpr char kMpsControlProgram[] = "nvidia-cuda-mps-control";

// What asking for a control daemon of CUDA MPS has shown.
enum class MpsAnswer {
  kAnswers,
  kAbsent,     // its program says that none runs
  kSilent,     // one seems to run and did not answer in time
  kNoProgram,  // there is no program to ask or start it with
};

struct MpsControl {
  MpsAnswer answer = MpsAnswer::kAbsent;
  std::string detail;  // for people: of no program, why
  // The users whose servers run, as far as this process may see them.
  std::vector<int64_t> server_users;
};

// What decides about MPS asks of the system, and may do there. Used by one
// thread.
class MpsSystem {
 public:
  virtual ~MpsSystem() = default;
  // Where control daemon and clients meet: CUDA_MPS_PIPE_DIRECTORY, or its default.
  virtual std::string Directory() const = 0;
  // Whether there is a control daemon's pipe, be it one of another container.
  virtual bool HasPipe() const = 0;
  virtual int64_t User() const = 0;
  // Takes seconds at most.
  virtual MpsControl Ask() = 0;
  // Starts a control daemon for all GPUs. OK when it answers; ALREADY_EXISTS when
  // one answers that somebody else has started meanwhile.
  virtual absl::Status Start() = 0;
  // Asks the control daemon to end, which it does when its last client has gone.
  virtual void Quit() = 0;
  // Keeps CUDA in this process from any control daemon. REQUIRES: before the first
  // CUDA call, and before threads start.
  virtual void KeepAway() = 0;
};

// Decides whether a daemon's GPUs are shared by way of MPS, and sees to it. A
// process attaches with its first CUDA call: Prepare comes before, Check after.
class Mps {
 public:
  struct Report {
    bool attached = false;
    bool warning = false;  // a control daemon is there, and is not used
    std::string reason;    // for people: why it is so
    std::string advice;    // for people: what to do
  };

  // FAILED_PRECONDITION with MpsMode::kOn where no control daemon answers and
  // none can be started, or where the one that answers serves another user. Does
  // nothing for the CPU alone. The system outlives this.
  static absl::StatusOr<Mps> Prepare(const Config& config, MpsSystem* system);

  Mps(Mps&& other) noexcept
      : mode_(other.mode_),
        system_(other.system_),
        started_(std::exchange(other.started_, false)),
        found_(other.found_),
        why_(std::move(other.why_)) {}
  Mps& operator=(Mps&&) = delete;
  // Ends a control daemon that Prepare started.
  ~Mps();

  // What came of it, by the devices that were opened; nothing where none is a GPU.
  // FAILED_PRECONDITION where it is not what the mode asks for.
  absl::StatusOr<std::optional<Report>> Check(const std::vector<DeviceInfo>& devices) const;
  // Whether Prepare has started the control daemon.
  bool started() const { return started_; }

 private:
  Mps(MpsMode mode, MpsSystem* system) : mode_(mode), system_(system) {}

  const MpsMode mode_;
  MpsSystem* const system_;
  bool started_ = false;
  bool found_ = false;  // a control daemon, one of its own too
  std::string why_;     // for people: what Prepare has found
};

}  // namespace spillway

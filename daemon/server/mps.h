#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/device/device.h"
#include "services/config/config.h"

namespace spillway {

// The program that queries, starts and ends a control daemon of CUDA MPS.
inline constexpr char kMpsControlProgram[] = "nvidia-cuda-mps-control";

// The result of a query for a control daemon of CUDA MPS.
enum class MpsAnswer {
  kAnswers,
  kAbsent,     // the program says that no control daemon runs
  kSilent,     // a control daemon seems to run, but did not answer in time
  kNoProgram,  // there is no program to query or start it
};

struct MpsControl {
  MpsAnswer answer = MpsAnswer::kAbsent;
  std::string detail;  // for people: why there is no program
  // User ids of the running MPS servers that this process can see.
  std::vector<int64_t> server_users;
};

// The system calls and programs that the decision about MPS needs. Used by one thread.
class MpsSystem {
 public:
  virtual ~MpsSystem() = default;
  // The directory in which clients find the control daemon: CUDA_MPS_PIPE_DIRECTORY, or its
  // default.
  virtual std::string Directory() const = 0;
  // Whether the pipe of a control daemon exists, which may run in another container.
  virtual bool HasPipe() const = 0;
  virtual int64_t User() const = 0;
  // Queries the control daemon. Takes at most a few seconds.
  virtual MpsControl Ask() = 0;
  // Starts a control daemon for all GPUs. OK when it answers; ALREADY_EXISTS if another process has
  // started one in the meantime and that one answers.
  virtual absl::Status Start() = 0;
  // Asks the control daemon to end. It ends when its last client has ended.
  virtual void Quit() = 0;
  // Keeps CUDA in this process from using any control daemon. REQUIRES: called before the first
  // CUDA call and before threads start.
  virtual void KeepAway() = 0;
};

// Decides whether the GPUs of the daemon are shared through MPS, and sets this up. A process
// attaches to MPS with its first CUDA call: call Prepare() before that, and Check() after it.
class Mps {
 public:
  struct Report {
    bool attached = false;
    bool warning = false;  // a control daemon exists, but is not used
    std::string reason;    // for people: why MPS is used or not
    std::string advice;    // for people: what to do
  };

  // FAILED_PRECONDITION with MpsMode::kOn if no control daemon answers and none can be started, if
  // the one that answers serves another user, or if the device is the CPU. `system` must outlive
  // the result.
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

  // Whether the opened devices use MPS; nothing if none is a GPU. FAILED_PRECONDITION if this is
  // not what the mode asks for.
  absl::StatusOr<std::optional<Report>> Check(const std::vector<DeviceInfo>& devices) const;
  // Whether Prepare has started the control daemon.
  bool started() const { return started_; }

 private:
  Mps(MpsMode mode, MpsSystem* system) : mode_(mode), system_(system) {}

  const MpsMode mode_;
  MpsSystem* const system_;
  bool started_ = false;
  bool found_ = false;  // a control daemon exists, perhaps one that Prepare has started
  std::string why_;     // for people: the findings of Prepare
};

}  // namespace spillway

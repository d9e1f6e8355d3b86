#include "daemon/server/mps.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace spillway {
namespace {

absl::Status Refused(std::string why) {
  return absl::FailedPreconditionError(absl::StrCat("--mps on: ", why));
}

// The user that the control daemon serves instead of `user`, if any. CUDA would wait until the
// clients of that other user end. A server that belongs to root may serve all users.
std::optional<int64_t> OtherUser(const MpsControl& control, int64_t user) {
  const auto& users = control.server_users;
  if (std::find(users.begin(), users.end(), user) != users.end()) return std::nullopt;
  const auto other =
      std::find_if(users.begin(), users.end(), [](int64_t server) { return server != 0; });
  return other == users.end() ? std::nullopt : std::optional(*other);
}

// Why CUDA should be kept from the control daemon that was queried; empty if CUDA may use it.
std::string Trouble(const MpsControl& control, const MpsSystem& system) {
  if (control.answer == MpsAnswer::kSilent) {
    return absl::StrCat("the control daemon at ", system.Directory(),
                        " does not answer; CUDA would wait for it");
  }
  if (control.answer != MpsAnswer::kAnswers) return "";
  if (const std::optional<int64_t> other = OtherUser(control, system.User())) {
    return absl::StrCat("the control daemon at ", system.Directory(), " serves user ", *other,
                        ", but this process belongs to user ", system.User());
  }
  return "";
}

}  // namespace

absl::StatusOr<Mps> Mps::Prepare(const Config& config, MpsSystem* system) {
  Mps mps(config.mps, system);
  if (config.devices == std::vector<std::string>{"cpu"}) {
    if (config.mps == MpsMode::kOn) return Refused("device cpu is not a GPU");
    return mps;
  }
  if (config.mps == MpsMode::kOff) {
    system->KeepAway();
    mps.why_ = "--mps off";
    return mps;
  }
  const MpsControl control = system->Ask();
  const std::string directory = system->Directory();
  const bool has_pipe = control.answer == MpsAnswer::kNoProgram && system->HasPipe();
  const std::string trouble = Trouble(control, *system);
  if (!trouble.empty()) {
    if (config.mps == MpsMode::kOn) return Refused(trouble);
    system->KeepAway();
    mps.why_ = trouble;
    mps.found_ = true;
  } else if (control.answer == MpsAnswer::kAnswers) {
    mps.why_ = absl::StrCat("a control daemon answers at ", directory);
    mps.found_ = true;
  } else if (has_pipe) {
    // In a container that has only the pipe and not the program, CUDA attaches anyway.
    mps.why_ = absl::StrCat("a control daemon's pipe is at ", directory, ", but there is no ",
                            kMpsControlProgram, " to query it");
    mps.found_ = true;
  } else if (config.mps == MpsMode::kAuto) {
    mps.why_ = absl::StrCat("no control daemon answers at ", directory);
  } else if (control.answer == MpsAnswer::kNoProgram) {
    return Refused(absl::StrCat("no control daemon runs at ", directory,
                                ", and none can be started: ", control.detail));
  } else {
    const absl::Status status = system->Start();
    if (!status.ok() && !absl::IsAlreadyExists(status)) {
      return Refused(absl::StrCat("cannot start ", kMpsControlProgram, " at ", directory, ": ",
                                  std::string(status.message())));
    }
    mps.started_ = status.ok();
    mps.found_ = true;
    mps.why_ = absl::StrCat(mps.started_ ? "started a" : "a", " control daemon",
                            mps.started_ ? " at " : " answers at ", directory);
  }
  return mps;
}

Mps::~Mps() {
  if (started_) system_->Quit();
}

absl::StatusOr<std::optional<Mps::Report>> Mps::Check(
    const std::vector<DeviceInfo>& devices) const {
  std::vector<std::string> shared;
  std::vector<std::string> apart;
  bool unknown = false;
  for (const DeviceInfo& device : devices) {
    if (device.uuid.empty()) continue;  // not a GPU
    unknown |= !device.mps.has_value();
    (device.mps.value_or(false) ? shared : apart).push_back(device.name);
  }
  if (shared.empty() && apart.empty()) {
    if (mode_ == MpsMode::kOn) {
      return Refused("there is no GPU that can be used (see --device)");
    }
    return std::nullopt;
  }
  if (mode_ == MpsMode::kOff && !shared.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("--mps off: CUDA shares ", absl::StrJoin(shared, ", "),
                     " through MPS anyway; stop the MPS control daemon, or omit --mps"));
  }
  if (apart.empty()) {
    return Report{.attached = true,
                  .reason = why_,
                  .advice = absl::StrCat("run clients with CUDA_MPS_PIPE_DIRECTORY=",
                                         system_->Directory(), ", as the same user")};
  }
  const std::string unsaid = unknown ? "; this driver does not say whether CUDA is attached" : "";
  if (mode_ == MpsMode::kOn) {
    return Refused(absl::StrCat("CUDA does not share ", absl::StrJoin(apart, ", "),
                                " through MPS: ", why_, unsaid,
                                "; see the log in CUDA_MPS_LOG_DIRECTORY, and whether the control "
                                "daemon was started with another CUDA_VISIBLE_DEVICES"));
  }
  return Report{.warning = found_,
                .reason = absl::StrCat(absl::StrJoin(apart, ", "), ": ", why_, unsaid),
                .advice =
                    "kernels of clients take turns with the daemon's; --mps on shares the GPU, and "
                    "starts a control daemon if none runs"};
}

}  // namespace spillway

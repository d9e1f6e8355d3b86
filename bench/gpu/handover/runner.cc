#include "bench/gpu/handover/runner.h"

#include <sys/wait.h>

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/gpu/handover/party.h"
#include "gpu/cuda/error.h"
#include "gpu/cuda/mps.h"
#include "host/base/status_macros.h"

namespace spillway::bench {
namespace {

using Clock = std::chrono::steady_clock;

bool Lives(pid_t child) {
  siginfo_t info = {};
  const int result = waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOHANG | WNOWAIT);
  return result == 0 && info.si_pid == 0;
}

// Maps the peer's DeviceBlock into this process for as long as the object lives.
class MappedBlock {
 public:
  static absl::StatusOr<MappedBlock> Open(const cudaIpcMemHandle_t& handle) {
    void* memory = nullptr;
    SPILLWAY_CUDA_RETURN_IF_ERROR(
        cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess));
    return MappedBlock(memory);
  }
  MappedBlock(MappedBlock&& other) noexcept : memory_(std::exchange(other.memory_, nullptr)) {}
  MappedBlock& operator=(MappedBlock&&) = delete;
  ~MappedBlock() {
    if (memory_ != nullptr) SPILLWAY_CUDA_REPORT(cudaIpcCloseMemHandle(memory_));
  }
  DeviceBlock* get() const { return static_cast<DeviceBlock*>(memory_); }

 private:
  explicit MappedBlock(void* memory) : memory_(memory) {}
  void* memory_;
};

class Rounds {
 public:
  Rounds(const RunnerOptions& options, Party* party)
      : options_(options), party_(*party), shared_(party->shared()) {}

  absl::Status Measure(Measured& measured) {
    shared_.signal = measured.signal;
    shared_.first_round = round_ + 1;
    shared_.round_count = options_.warm_up_count + options_.round_count;
    shared_.work_ns = options_.work_ns;
    const uint32_t count = shared_.round_count;
    shared_.request_count.store(++request_count_);
    for (uint32_t i = 0; i < count; ++i) {
      ++round_;
      const Clock::time_point start = Clock::now();
      RETURN_IF_ERROR(measured.signal == Signal::kPolling
                          ? Poll()
                          : Enqueue(measured.signal == Signal::kDeviceFlags));
      const std::chrono::duration<double> took = Clock::now() - start;
      shared_.round.store(round_);
      if (i >= options_.warm_up_count) measured.seconds.push_back(took.count());
    }
    RETURN_IF_ERROR(party_.WaitForStream(kStepTimeout, "the runner's stream"));
    return party_.Wait(kStepTimeout, "the peer's last turn",
                       [&] { return shared_.ended_count.load() == request_count_; });
  }

  // DATA_LOSS if a kernel did not find the value that the kernel before it wrote.
  absl::Status CheckCounter() {
    DeviceBlock found = {};
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(&found, party_.block(), sizeof(found),
                                                  cudaMemcpyDeviceToHost, party_.stream()));
    RETURN_IF_ERROR(party_.WaitForStream(kStepTimeout, "a copy of the counter"));
    // Two kernels ran before the first round.
    const uint32_t expected = 2 * round_ + 2;
    if (found.counter == expected && found.wrong_count == 0) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat("the counter is ", found.counter, " after ", round_,
                                            " rounds, where it must be ", expected, "; ",
                                            found.wrong_count, " kernels found a wrong one"));
  }

 private:
  absl::Status Enqueue(bool device_flags) {
    uint32_t* const go = device_flags ? &party_.block()->go : party_.go();
    uint32_t* const done = device_flags ? &party_.block()->done : party_.done();
    const cudaStream_t stream = party_.stream();
    SPILLWAY_CUDA_RETURN_IF_ERROR(
        LaunchAdvance({.block = party_.block(), .expected = 2 * round_}, stream));
    RETURN_IF_ERROR(party_.values().Write(stream, go, round_));
    RETURN_IF_ERROR(party_.values().WaitUntilReached(stream, done, round_));
    RETURN_IF_ERROR(party_.values().Write(stream, party_.told(), round_));
    return party_.Wait(kStepTimeout, "the peer's stream",
                       [&] { return Reached(shared_.told.load(), round_); });
  }

  absl::Status Poll() {
    SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchAdvance({.block = party_.block(),
                                                 .expected = 2 * round_,
                                                 .flag = party_.go(),
                                                 .flag_value = round_},
                                                party_.stream()));
    return party_.Wait(kStepTimeout, "the peer's flag",
                       [&] { return Reached(shared_.done.load(), round_); });
  }

  const RunnerOptions& options_;
  const Party& party_;
  SharedBlock& shared_;
  uint32_t round_ = 0;
  uint32_t request_count_ = 0;
};

absl::Status MeasureAll(const RunnerOptions& options, Party& party, Result& result) {
  RETURN_IF_ERROR(party.RunOnce(1));
  const absl::Status probe = party.Probe();
  if (!probe.ok() && !absl::IsUnimplemented(probe)) return probe;
  Rounds rounds(options, &party);
  for (const Signal signal : kSignals) {
    Measured measured = {.signal = signal, .seconds = {}, .unavailable = ""};
    if (signal != Signal::kPolling && !probe.ok()) {
      measured.unavailable = std::string(probe.message());
    } else if (signal != Signal::kPolling && !party.shared().has_stream_values) {
      measured.unavailable = "the peer's streams have no memory operations";
    } else {
      RETURN_IF_ERROR(rounds.Measure(measured));
      RETURN_IF_ERROR(rounds.CheckCounter());
    }
    result.measured.push_back(std::move(measured));
  }
  return absl::OkStatus();
}

absl::Status RunAll(const RunnerOptions& options, Party& party, Result& result) {
  SharedBlock& shared = party.shared();
  cudaDeviceProp properties;
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaGetDeviceProperties(&properties, options.gpu));
  result.gpu_name = properties.name;
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaDriverGetVersion(&result.driver_version));
  RETURN_IF_ERROR(party.Wait(kStartTimeout, "the peer to start CUDA",
                             [&] { return shared.is_ready.load() != 0; }));
  result.runner_has_mps = cuda::SharedByMps(options.gpu).value_or(false);
  result.peer_has_mps = shared.mps;
  {
    ASSIGN_OR_RETURN(const MappedBlock block, MappedBlock::Open(shared.block));
    party.SetBlock(block.get());
    absl::Status status = MeasureAll(options, party, result);
    // Release writes flags in the peer's memory, so call it while that is still mapped.
    if (!status.ok()) party.Release(status);
    party.SetBlock(nullptr);
    RETURN_IF_ERROR(status);
  }
  // Stop the peer only after the block is unmapped, because the peer then frees it.
  shared.stop = true;
  shared.request_count.fetch_add(1);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Result> RunRounds(const RunnerOptions& options, pid_t peer, SharedPage* page) {
  absl::StatusOr<Party> party = Party::Open(options.gpu, page, [peer] { return Lives(peer); });
  if (!party.ok()) {
    SetFailed(**page, party.status());
    return party.status();
  }
  Result result;
  absl::Status status = RunAll(options, *party, result);
  if (!status.ok()) {
    SetFailed(**page, status);
    return status;
  }
  return result;
}

}  // namespace spillway::bench

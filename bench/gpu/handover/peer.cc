#include "bench/gpu/handover/peer.h"

#include <unistd.h>

#include <utility>

#include "bench/gpu/handover/party.h"
#include "gpu/cuda/error.h"
#include "gpu/cuda/mps.h"
#include "host/base/status_macros.h"

namespace spillway::bench {
namespace {

// The peer puts this many rounds on its stream ahead of the runner, so that the measured time does
// not include the peer's launches.
constexpr uint32_t kAheadCount = 32;

// Large enough for an allocation of its own: an IPC handle covers the driver's whole underlying
// allocation, which small allocations share with others.
constexpr size_t kExportBytes = size_t{2} << 20;

// The counter at the peer's turn of a round. Two kernels advance it before round 1. In each round,
// the runner's kernel advances it and then the peer's.
uint32_t CounterBefore(uint32_t round) { return 2 * round + 1; }

absl::Status TakeTurns(const Party& party, bool device_flags, uint32_t first, uint32_t count,
                       int64_t work_ns) {
  uint32_t* const go = device_flags ? &party.block()->go : party.go();
  uint32_t* const done = device_flags ? &party.block()->done : party.done();
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t round = first + i;
    if (i >= kAheadCount) {
      RETURN_IF_ERROR(party.Wait(kStepTimeout, "the runner's rounds", [&] {
        return Reached(party.shared().round.load(), round - kAheadCount);
      }));
    }
    RETURN_IF_ERROR(party.values().WaitUntilReached(party.stream(), go, round));
    SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchAdvance(
        {.block = party.block(), .expected = CounterBefore(round), .work_ns = work_ns},
        party.stream()));
    RETURN_IF_ERROR(party.values().Write(party.stream(), done, round));
  }
  return absl::OkStatus();
}

absl::Status PollTurns(const Party& party, uint32_t first, uint32_t count, int64_t work_ns) {
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t round = first + i;
    RETURN_IF_ERROR(party.Wait(kStepTimeout, "the runner's flag",
                               [&] { return Reached(party.shared().go.load(), round); }));
    SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchAdvance({.block = party.block(),
                                                 .expected = CounterBefore(round),
                                                 .work_ns = work_ns,
                                                 .flag = party.done(),
                                                 .flag_value = round},
                                                party.stream()));
  }
  return absl::OkStatus();
}

absl::Status Serve(Party& party, int gpu) {
  SharedBlock& shared = party.shared();
  void* memory = nullptr;
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaMalloc(&memory, kExportBytes));
  party.SetBlock(static_cast<DeviceBlock*>(memory));
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(memory, 0, sizeof(DeviceBlock), party.stream()));
  RETURN_IF_ERROR(party.RunOnce(0));
  const absl::Status probe = party.Probe();
  if (!probe.ok() && !absl::IsUnimplemented(probe)) return probe;
  shared.has_stream_values = probe.ok();
  shared.mps = cuda::SharedByMps(gpu).value_or(false);
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaIpcGetMemHandle(&shared.block, memory));
  shared.is_ready.store(1);
  for (uint32_t served = 0;; ++served) {
    shared.ended_count.store(served);
    RETURN_IF_ERROR(party.Wait(kStartTimeout, "the runner's next request",
                               [&] { return shared.request_count.load() > served; }));
    if (shared.stop) break;
    const uint32_t first = shared.first_round;
    const uint32_t count = shared.round_count;
    RETURN_IF_ERROR(shared.signal == Signal::kPolling
                        ? PollTurns(party, first, count, shared.work_ns)
                        : TakeTurns(party, shared.signal == Signal::kDeviceFlags, first, count,
                                    shared.work_ns));
    RETURN_IF_ERROR(party.WaitForStream(kStepTimeout, "the last turns"));
  }
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaFree(memory));
  party.SetBlock(nullptr);
  return absl::OkStatus();
}

}  // namespace

absl::Status RunPeer(int gpu, pid_t runner, SharedPage page) {
  absl::StatusOr<Party> party = Party::Open(gpu, &page, [runner] { return getppid() == runner; });
  if (!party.ok()) {
    SetFailed(*page, party.status());
    return party.status();
  }
  absl::Status status = Serve(*party, gpu);
  if (!status.ok()) party->Release(status);
  return status;
}

}  // namespace spillway::bench

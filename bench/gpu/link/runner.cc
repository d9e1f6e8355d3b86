#include "bench/gpu/link/runner.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/gpu/link/gather_launch.h"
#include "bench/gpu/link/pattern.h"
#include "bench/gpu/link/row_list.h"
#include "bench/gpu/link/transfer.h"
#include "gpu/cuda/buffer.h"
#include "gpu/cuda/error.h"
#include "gpu/cuda/stream.h"
#include "host/base/status_macros.h"

namespace spillway::bench {
namespace {

constexpr int kWays = 2;
// Longer than the host takes to queue the timed work behind the hold.
constexpr int64_t kHoldNs = 50'000;
// GPU memory is filled with this byte before rows arrive, so that it does not hold the pattern.
constexpr int kPoisonByte = 0xA5;

// One direction of one repetition. Transfers point into it, so the vector that holds it must not
// grow.
struct WayList {
  bool to_host = false;
  std::vector<uint32_t> rows;
  RowTransfer transfer;
};

}  // namespace

struct Runner::Impl {
  cuda::DeviceBuffer packed;
  std::array<cuda::DeviceBuffer, kWays> lists;
  cuda::DeviceBuffer check;
  std::array<cuda::Stream, kWays> streams;
  cuda::Event start;
  cuda::Event stop;
  cuda::Event joined;

  cudaStream_t stream() const { return streams[0].get(); }

  absl::Status Wait() const {
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream()));
    return absl::OkStatus();
  }

  // Draws the repetition's rows and uploads their lists.
  absl::StatusOr<std::vector<WayList>> Prepare(const Measurement& m, int repetition,
                                               std::span<std::byte> memory) const;
  // Fills the destinations with data that differ from the pattern.
  absl::Status Poison(const std::vector<WayList>& ways, std::span<std::byte> memory) const;
  // Fills the sources in GPU memory with the pattern; host memory has it already.
  absl::Status FillSources(const std::vector<WayList>& ways) const;
  // Moves the rows. Returns the seconds from before the first byte until after the last.
  absl::StatusOr<double> Move(const Measurement& m, const std::vector<WayList>& ways) const;
  // What is wrong with the rows that arrived in GPU memory; "" if nothing.
  absl::StatusOr<std::string> CheckDevice(const std::vector<WayList>& ways) const;
  // The same for rows that arrived in host memory.
  static std::string CheckHost(const std::vector<WayList>& ways, std::span<std::byte> memory);
};

absl::StatusOr<std::vector<WayList>> Runner::Impl::Prepare(const Measurement& m, int repetition,
                                                           std::span<std::byte> memory) const {
  std::vector<WayList> ways(m.way_count());
  int64_t packed_bytes = 0;
  for (size_t i = 0; i < ways.size(); ++i) {
    WayList& way = ways[i];
    way.to_host = m.direction == Direction::kDeviceToHost || i == 1;
    way.rows = DrawRows(m, i == 0 ? Way::kFirst : Way::kSecond, repetition);
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(lists[i].data(), way.rows.data(),
                                                  way.rows.size() * sizeof(uint32_t),
                                                  cudaMemcpyHostToDevice, stream()));
    way.transfer = {.span = memory.data(),
                    .rows = reinterpret_cast<const uint32_t*>(lists[i].data()),
                    .packed = packed.data() + packed_bytes,
                    .row_count = static_cast<uint32_t>(m.row_count),
                    .row_bytes_log2 = std::countr_zero(static_cast<uint64_t>(m.row_bytes))};
    packed_bytes += way.transfer.bytes();
  }
  assert(packed_bytes <= packed.bytes());
  return ways;
}

absl::Status Runner::Impl::Poison(const std::vector<WayList>& ways,
                                  std::span<std::byte> memory) const {
  for (const WayList& way : ways) {
    if (way.to_host) {
      PoisonRows(memory, way.rows, int64_t{1} << way.transfer.row_bytes_log2);
    } else {
      SPILLWAY_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(
          way.transfer.packed, kPoisonByte, static_cast<size_t>(way.transfer.bytes()), stream()));
    }
  }
  return absl::OkStatus();
}

absl::Status Runner::Impl::FillSources(const std::vector<WayList>& ways) const {
  for (const WayList& way : ways) {
    if (!way.to_host) continue;
    SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchFillPattern(way.transfer, stream()));
  }
  return absl::OkStatus();
}

absl::StatusOr<double> Runner::Impl::Move(const Measurement& m,
                                          const std::vector<WayList>& ways) const {
  std::vector<Transfer> transfers;
  std::vector<cudaStream_t> on;
  for (size_t i = 0; i < ways.size(); ++i) {
    transfers.emplace_back(m.engine, ways[i].to_host, ways[i].transfer, ways[i].rows,
                           std::max(m.sm_count / m.way_count(), 1));
    on.push_back(streams[i].get());
  }
  // All earlier work must be done before the clock starts.
  RETURN_IF_ERROR(Wait());
  // With the hold, a kernel's time does not include the host's calls. The time of copies does.
  if (m.sm_count > 0) SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchHold(kHoldNs, stream()));
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventRecord(start.get(), stream()));
  for (size_t i = 1; i < on.size(); ++i) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamWaitEvent(on[i], start.get()));
  }
  RETURN_IF_ERROR(Issue(transfers, on));
  for (size_t i = 1; i < on.size(); ++i) {
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventRecord(joined.get(), on[i]));
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamWaitEvent(stream(), joined.get()));
  }
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventRecord(stop.get(), stream()));
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventSynchronize(stop.get()));
  float milliseconds = 0;
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaEventElapsedTime(&milliseconds, start.get(), stop.get()));
  return milliseconds / 1e3;
}

absl::StatusOr<std::string> Runner::Impl::CheckDevice(const std::vector<WayList>& ways) const {
  for (const WayList& way : ways) {
    if (way.to_host) continue;
    auto* const found = reinterpret_cast<PatternCheck*>(check.data());
    PatternCheck result = {};
    SPILLWAY_CUDA_RETURN_IF_ERROR(LaunchCheckPattern(way.transfer, found, stream()));
    SPILLWAY_CUDA_RETURN_IF_ERROR(
        cudaMemcpyAsync(&result, found, sizeof(result), cudaMemcpyDeviceToHost, stream()));
    RETURN_IF_ERROR(Wait());
    if (result.wrong_word_count > 0) {
      return absl::StrCat(result.wrong_word_count, " of ",
                          way.transfer.bytes() / static_cast<int64_t>(sizeof(uint64_t)),
                          " words in GPU memory differ from their source");
    }
  }
  return std::string();
}

std::string Runner::Impl::CheckHost(const std::vector<WayList>& ways, std::span<std::byte> memory) {
  for (const WayList& way : ways) {
    if (!way.to_host) continue;
    const int64_t row_bytes = int64_t{1} << way.transfer.row_bytes_log2;
    if (const auto wrong = FindWrongRow(memory, way.rows, row_bytes)) {
      return absl::StrCat("row ", way.rows[*wrong], " in host memory (", *wrong, " of ",
                          way.rows.size(), " in the list) differs from its source");
    }
  }
  return "";
}

absl::StatusOr<Runner> Runner::Create(std::span<const Measurement> plan, MemoryBudget* budget) {
  int64_t packed_bytes = 0;
  int64_t row_count = 0;
  for (const Measurement& m : plan) {
    packed_bytes = std::max(packed_bytes, m.moved_bytes());
    row_count = std::max(row_count, m.row_count);
  }
  auto impl = std::make_unique<Impl>();
  absl::Status status;
  const auto take = [&status](auto made, auto& member) {
    if (!made.ok()) {
      status.Update(made.status());
    } else {
      member = *std::move(made);
    }
  };
  using cuda::DeviceBuffer;
  take(DeviceBuffer::Create(packed_bytes, budget, "rows side by side"), impl->packed);
  for (DeviceBuffer& list : impl->lists) {
    take(DeviceBuffer::Create(row_count * static_cast<int64_t>(sizeof(uint32_t)), budget,
                              "a list of rows"),
         list);
  }
  take(DeviceBuffer::Create(sizeof(PatternCheck), budget, "the result of a check"), impl->check);
  for (cuda::Stream& stream : impl->streams) take(cuda::Stream::Create(), stream);
  take(cuda::Event::Create(true), impl->start);
  take(cuda::Event::Create(true), impl->stop);
  take(cuda::Event::Create(false), impl->joined);
  if (!status.ok()) return status;
  return Runner(std::move(impl));
}

Runner::Runner(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Runner::Runner(Runner&&) noexcept = default;
Runner::~Runner() = default;

absl::StatusOr<Outcome> Runner::Run(const Measurement& m, int repetitions,
                                    std::span<std::byte> memory) {
  assert(static_cast<int64_t>(memory.size()) == m.allocation.bytes);
  Outcome outcome;
  for (int repetition = 0; repetition <= repetitions; ++repetition) {
    // The first repetition is a warm-up and is not timed. Its destinations are poisoned, and
    // checked in GPU and host memory. Reading rows in host memory would put them into the
    // processor's caches, so later repetitions are checked only in GPU memory, where this does no
    // harm.
    const bool first = repetition == 0;
    const absl::StatusOr<std::vector<WayList>> ways = impl_->Prepare(m, repetition, memory);
    if (!ways.ok()) return ways.status();
    absl::Status status = first ? impl_->Poison(*ways, memory) : absl::OkStatus();
    status.Update(impl_->FillSources(*ways));
    if (!status.ok()) return status;
    const absl::StatusOr<double> seconds = impl_->Move(m, *ways);
    if (!seconds.ok()) return seconds.status();
    absl::StatusOr<std::string> wrong = impl_->CheckDevice(*ways);
    if (!wrong.ok()) return wrong.status();
    if (first && wrong->empty()) *wrong = Impl::CheckHost(*ways, memory);
    if (!wrong->empty()) {
      outcome.wrong = *std::move(wrong);
      outcome.seconds.clear();
      return outcome;
    }
    if (!first) outcome.seconds.push_back(*seconds);
  }
  outcome.checked = true;
  return outcome;
}

}  // namespace spillway::bench

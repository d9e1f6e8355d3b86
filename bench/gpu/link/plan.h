#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace spillway::bench {

// The plan of the link benchmark: all its measurements, decided before the first one runs. Nothing
// here uses a GPU.

enum class Experiment {
  kPeak,  // large copies by the copy engine; other results are compared with these
  kEngines,
  kRows,
  kSpans,
  kDensity,
  kSms,
  kDirections,
  kNuma,
  kPinning,
};

// How the bytes are moved.
enum class Engine {
  kCopyEngine,  // one cudaMemcpyAsync per row
  kSm,          // one kernel with 16-byte loads or stores of host memory
  kBulk,        // one kernel with bulk copies through shared memory
  kBatch,       // one cudaMemcpyBatchAsync for all rows
};

enum class Direction { kHostToDevice, kDeviceToHost, kBoth };

// The order of the rows in the list: sorted by address, or shuffled.
enum class Order { kSorted, kShuffled };

// How host memory is allocated and pinned.
enum class Pinning {
  kHostAlloc,   // cudaHostAlloc
  kHugePages,   // mmap, huge pages, touched by one thread per core, cudaHostRegister in chunks
  kSmallPages,  // the same with 4 KiB pages
};

// Names as in the command line and the output.
std::string_view Name(Experiment experiment);
std::string_view Name(Engine engine);
std::string_view Name(Direction direction);
std::string_view Name(Order order);
std::string_view Name(Pinning pinning);

// The experiments that can be selected: all except kPeak, which always runs.
std::span<const Experiment> Experiments();

// Pinned host memory. Several measurements share one allocation.
struct Allocation {
  Pinning pinning = Pinning::kHugePages;
  int numa_node = -1;  // hwloc logical index; -1: the system's choice
  int64_t bytes = 0;
  bool operator==(const Allocation&) const = default;
};

struct Measurement {
  Experiment experiment = Experiment::kPeak;
  Engine engine = Engine::kCopyEngine;
  Direction direction = Direction::kHostToDevice;
  Order order = Order::kSorted;
  // Total number of SMs; with kBoth, the directions share them. 0 for engines that use none.
  int sm_count = 0;
  Allocation allocation;
  // The rows lie in the first span_bytes of the allocation.
  int64_t span_bytes = 0;
  // A power of two.
  int64_t row_bytes = 0;
  // The share of the span's rows that is in the list.
  double density = 1;

  // Rows that are moved in each direction. A list of density * span rows may take too long for one
  // repetition. It is then cut to row_count rows.
  int64_t row_count = 0;
  // The list is drawn from this many consecutive rows. These are all rows of the span, or, for a
  // sorted list that was cut, the part of the span that the remaining list covers.
  int64_t domain_row_count = 0;

  int way_count() const { return direction == Direction::kBoth ? 2 : 1; }
  // Rows of the span for one direction: kBoth reads one half of the span and writes the other.
  int64_t span_row_count() const { return span_bytes / row_bytes / way_count(); }
  // Over both directions.
  int64_t moved_row_count() const { return row_count * way_count(); }
  int64_t moved_bytes() const { return moved_row_count() * row_bytes; }
};

// "density: sm h2d, 512 B rows, 2% sorted of 16 GiB, 8 SMs".
std::string Describe(const Measurement& measurement);
// "16 GiB", "512 B": uses the largest binary unit that gives a whole number.
std::string FormatBytes(int64_t bytes);

// The properties of the machine that the plan depends on.
struct Machine {
  int64_t memory_available_bytes = 0;
  // Memory of every NUMA node, by hwloc logical index; never empty.
  std::vector<int64_t> numa_node_bytes;
  // The node nearest to the GPU; -1: unknown.
  int gpu_numa_node = -1;
  int sm_count = 0;
  bool has_bulk = false;
  bool has_batch = false;
};

struct PlanOptions {
  std::optional<Experiment> experiment = std::nullopt;  // nothing: all
  bool quick = false;
  // 0: 16 GiB, or the largest power of two that the machine allows.
  int64_t span_bytes = 0;
};

// The smallest span. Every span is a multiple of this.
inline constexpr int64_t kSpanStepBytes = int64_t{256} << 20;
// The most bytes that one repetition moves, over both directions.
inline constexpr int64_t kMovedBytesMax = int64_t{1} << 30;

// Returns the measurements in the order in which they run. Measurements that share an allocation
// are consecutive, so that only one allocation is held at a time. The largest allocation is the
// span. INVALID_ARGUMENT if the span is not a multiple of kSpanStepBytes or has too many rows;
// RESOURCE_EXHAUSTED if the span (kSpanStepBytes if none is given) is more than half of the
// available memory, or of the memory of the GPU's NUMA node.
absl::StatusOr<std::vector<Measurement>> MakePlan(const PlanOptions& options,
                                                  const Machine& machine);

}  // namespace spillway::bench

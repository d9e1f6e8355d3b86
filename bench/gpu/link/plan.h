#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace spillway::bench {

// What the link benchmark measures, decided before anything is measured.
// Nothing here touches a GPU.

enum class Experiment {
  kPeak,  // large copies by the copy engine: what other results are held against
  kEngines,
  kRows,
  kSpans,
  kDensity,
  kSms,
  kDirections,
  kNuma,
  kPinning,
};

// What moves the bytes.
enum class Engine {
  kCopyEngine,  // one cudaMemcpyAsync a row
  kSm,          // one kernel, 16-byte loads or stores of host memory
  kBulk,        // one kernel, bulk copies through shared memory
  kBatch,       // one cudaMemcpyBatchAsync for all rows
};

enum class Direction { kHostToDevice, kDeviceToHost, kBoth };

// Of the rows by address.
enum class Order { kSorted, kShuffled };

// How host memory is obtained and pinned.
enum class Pinning {
  kHostAlloc,   // cudaHostAlloc
  kHugePages,   // mmap, huge pages, first touch by a thread a core, cudaHostRegister in chunks
  kSmallPages,  // the same with 4 KiB pages
};

// As the command line and the output have them.
std::string_view Name(Experiment experiment);
std::string_view Name(Engine engine);
std::string_view Name(Direction direction);
std::string_view Name(Order order);
std::string_view Name(Pinning pinning);

// The experiments that can be asked for: all but kPeak, which is always run.
std::span<const Experiment> Experiments();

// Pinned host memory that measurements share.
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
  // In all, shared by both ways of kBoth; 0 for engines that use none.
  int sm_count = 0;
  Allocation allocation;
  // The rows lie in the first span_bytes of the allocation.
  int64_t span_bytes = 0;
  // A power of two.
  int64_t row_bytes = 0;
  // Of the rows of the span, the share that is listed.
  double density = 1;

  // Rows that are moved each way. The list of density * span rows, where it is
  // longer than a repetition should take, is cut: row_count is what remains.
  int64_t row_count = 0;
  // They are drawn from as many neighbouring rows: from all of the span's, or,
  // of a sorted list that is cut, from those that its part lies in.
  int64_t domain_row_count = 0;

  int way_count() const { return direction == Direction::kBoth ? 2 : 1; }
  // Rows of the span that a way may use: kBoth reads one half, writes the other.
  int64_t span_row_count() const { return span_bytes / row_bytes / way_count(); }
  // Over both ways.
  int64_t moved_row_count() const { return row_count * way_count(); }
  int64_t moved_bytes() const { return moved_row_count() * row_bytes; }
};

// "density: sm h2d, 512 B rows, 2% sorted of 16 GiB, 8 SMs".
std::string Describe(const Measurement& measurement);
// "16 GiB", "512 B": with the largest binary unit that leaves a whole number.
std::string FormatBytes(int64_t bytes);

// What the plan depends on.
struct Machine {
  int64_t memory_available_bytes = 0;
  // Local memory of every NUMA node, by hwloc logical index; never empty.
  std::vector<int64_t> numa_node_bytes;
  // The GPU's; -1: unknown.
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

// The smallest span, and what every span is a multiple of.
inline constexpr int64_t kSpanStepBytes = int64_t{256} << 20;
// The most that one repetition moves, both ways together.
inline constexpr int64_t kMovedBytesMax = int64_t{1} << 30;

// Measurements in the order in which they run: those that share an allocation
// stand together, so that one is held at a time. The largest allocation is
// the span. INVALID_ARGUMENT for a span that is no multiple of kSpanStepBytes;
// RESOURCE_EXHAUSTED where the span, or without one kSpanStepBytes, is more
// than half of the memory that is available, or of the GPU's NUMA node.
absl::StatusOr<std::vector<Measurement>> MakePlan(const PlanOptions& options,
                                                  const Machine& machine);

}  // namespace spillway::bench

#include "bench/gpu/link/plan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace spillway::bench {
namespace {

constexpr int64_t kKiB = int64_t{1} << 10;
constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGiB = int64_t{1} << 30;

constexpr int64_t kSpanDefaultBytes = 16 * kGiB;
constexpr int64_t kPeakRowBytes = 64 * kMiB;
// A row of K and V with head_dim 128 and 16-bit elements.
constexpr int64_t kTypicalRowBytes = 512;
constexpr double kTypicalDensity = 0.02;
// Enough SMs to fill the link, but few enough that the sparse rows in flight are close together.
constexpr int kTypicalSmCount = 8;

constexpr std::array kEngines = {Engine::kCopyEngine, Engine::kSm, Engine::kBulk, Engine::kBatch};
constexpr std::array kKernels = {Engine::kSm, Engine::kBulk};
constexpr std::array kOneWay = {Direction::kHostToDevice, Direction::kDeviceToHost};
constexpr std::array kDirections = {Direction::kHostToDevice, Direction::kDeviceToHost,
                                    Direction::kBoth};
constexpr std::array kOrders = {Order::kSorted, Order::kShuffled};
constexpr std::array kPinnings = {Pinning::kHostAlloc, Pinning::kHugePages, Pinning::kSmallPages};
constexpr std::array kExperiments = {
    Experiment::kEngines, Experiment::kRows,       Experiment::kSpans, Experiment::kDensity,
    Experiment::kSms,     Experiment::kDirections, Experiment::kNuma,  Experiment::kPinning};

bool UsesSms(Engine engine) { return engine == Engine::kSm || engine == Engine::kBulk; }

// The most rows per direction and repetition. Engines with a call or descriptor per row get fewer:
// the rate depends on these, so more rows only take longer.
int64_t RowCountMax(Engine engine) {
  switch (engine) {
    case Engine::kCopyEngine:
      return int64_t{1} << 13;
    case Engine::kBatch:
      return int64_t{1} << 14;
    case Engine::kSm:
    case Engine::kBulk:
      break;
  }
  return int64_t{1} << 21;
}

// first, 2 * first, 4 * first, ... below last, and last.
std::vector<int64_t> Doublings(int64_t first, int64_t last) {
  std::vector<int64_t> values;
  for (int64_t value = first; value < last; value *= 2) values.push_back(value);
  values.push_back(last);
  return values;
}

class Planner {
 public:
  Planner(const PlanOptions& options, const Machine& machine, Allocation main)
      : quick_(options.quick), machine_(machine), main_(main) {}

  void Add(Experiment experiment);
  std::vector<Measurement> Take() && { return std::move(plan_); }

 private:
  // The fields of a measurement that do not follow from others.
  struct Point {
    Engine engine = Engine::kSm;
    Direction direction = Direction::kHostToDevice;
    Order order = Order::kSorted;
    int64_t row_bytes = kTypicalRowBytes;
    double density = kTypicalDensity;
    int sm_count = kTypicalSmCount;
    int64_t span_bytes = 0;                               // 0: the whole allocation
    std::optional<Allocation> allocation = std::nullopt;  // nothing: the main allocation
  };

  void AddPeak();
  void AddEngines();
  void AddRows();
  void AddSpans();
  void AddDensity();
  void AddSms();
  void AddDirections();
  void AddNuma();
  void AddPinning();
  void Add(Experiment experiment, const Point& point);

  bool Available(Engine engine) const {
    if (engine == Engine::kBulk) return machine_.has_bulk;
    if (engine == Engine::kBatch) return machine_.has_batch;
    return true;
  }
  std::vector<int64_t> RowSizes() const {
    if (quick_) return {128, 512, 2 * kKiB, 4 * kKiB, 16 * kKiB, 64 * kKiB, kMiB};
    return Doublings(128, kMiB);
  }

  const bool quick_;
  const Machine& machine_;
  const Allocation main_;
  std::vector<Measurement> plan_;
};

void Planner::Add(Experiment experiment, const Point& point) {
  if (!Available(point.engine)) return;
  Measurement m;
  m.experiment = experiment;
  m.engine = point.engine;
  m.direction = point.direction;
  m.order = point.order;
  m.sm_count = UsesSms(point.engine) ? std::min(point.sm_count, machine_.sm_count) : 0;
  m.allocation = point.allocation.value_or(main_);
  m.span_bytes = point.span_bytes == 0 ? m.allocation.bytes : point.span_bytes;
  m.row_bytes = point.row_bytes;
  m.density = point.density;

  const int64_t span_rows = m.span_row_count();
  const auto listed = static_cast<double>(span_rows) * m.density;
  const int64_t wanted = std::clamp<int64_t>(std::llround(listed), 1, span_rows);
  const int64_t part = quick_ ? 4 : 1;
  const int64_t most =
      std::min(kMovedBytesMax / part / m.way_count() / m.row_bytes, RowCountMax(m.engine) / part);
  assert(most > 0);
  m.row_count = std::min(wanted, most);
  m.domain_row_count = span_rows;
  if (m.order == Order::kSorted && m.row_count < wanted) {
    const double share = static_cast<double>(m.row_count) / static_cast<double>(wanted);
    m.domain_row_count =
        std::clamp(static_cast<int64_t>(std::ceil(share * static_cast<double>(span_rows))),
                   m.row_count, span_rows);
  }
  plan_.push_back(m);
}

void Planner::AddPeak() {
  for (const Direction direction : kDirections) {
    Add(Experiment::kPeak, {.engine = Engine::kCopyEngine,
                            .direction = direction,
                            .row_bytes = kPeakRowBytes,
                            .density = 1});
  }
}

void Planner::AddEngines() {
  for (const Engine engine : kEngines) {
    for (const Direction direction : kOneWay) {
      for (const int64_t row_bytes : RowSizes()) {
        Add(Experiment::kEngines,
            {.engine = engine, .direction = direction, .row_bytes = row_bytes});
      }
    }
  }
}

void Planner::AddRows() {
  std::vector<int64_t> spans = {main_.bytes};
  if (!quick_ && main_.bytes > kSpanStepBytes) spans.push_back(kSpanStepBytes);
  for (const int64_t span_bytes : spans) {
    for (const Order order : kOrders) {
      for (const int64_t row_bytes : RowSizes()) {
        Add(Experiment::kRows, {.order = order, .row_bytes = row_bytes, .span_bytes = span_bytes});
      }
    }
  }
}

void Planner::AddSpans() {
  std::vector<int64_t> spans = Doublings(kSpanStepBytes, main_.bytes);
  if (quick_ && spans.size() > 3) spans = {spans.front(), spans[spans.size() / 2], spans.back()};
  std::vector<int64_t> row_sizes = {128, kTypicalRowBytes, 4 * kKiB};
  if (quick_) row_sizes.pop_back();
  for (const int64_t row_bytes : row_sizes) {
    for (const Order order : kOrders) {
      for (const int64_t span_bytes : spans) {
        Add(Experiment::kSpans, {.order = order, .row_bytes = row_bytes, .span_bytes = span_bytes});
      }
    }
  }
}

void Planner::AddDensity() {
  std::vector<double> densities = {.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1};
  std::vector<int> sm_counts = {4, kTypicalSmCount, 16, machine_.sm_count};
  if (quick_) {
    densities = {.0005, .005, .02, .1, 1};
    sm_counts = {4, machine_.sm_count};
  }
  for (const int sm_count : sm_counts) {
    for (const Order order : kOrders) {
      for (const double density : densities) {
        Add(Experiment::kDensity, {.order = order, .density = density, .sm_count = sm_count});
      }
    }
  }
  for (const double density : densities) {
    Add(Experiment::kDensity, {.engine = Engine::kBulk, .density = density});
  }
}

void Planner::AddSms() {
  std::vector<int> counts = {1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96};
  if (quick_) counts = {1, 2, 4, 8, 16, 32};
  std::erase_if(counts, [this](int count) { return count >= machine_.sm_count; });
  counts.push_back(machine_.sm_count);
  std::vector<double> densities = {kTypicalDensity};
  if (!quick_) densities.push_back(.005);
  for (const Engine engine : kKernels) {
    for (const double density : densities) {
      for (const Order order : kOrders) {
        if (quick_ && order == Order::kShuffled) continue;
        for (const int count : counts) {
          Add(Experiment::kSms,
              {.engine = engine, .order = order, .density = density, .sm_count = count});
        }
      }
    }
  }
}

void Planner::AddDirections() {
  // Dense lists, so that only the link limits the rates that are compared.
  for (const Engine engine : kEngines) {
    for (const Direction direction : kDirections) {
      for (const int64_t row_bytes : {4 * kKiB, 64 * kKiB, kMiB}) {
        Add(Experiment::kDirections,
            {.engine = engine, .direction = direction, .row_bytes = row_bytes, .density = 1});
      }
    }
  }
}

void Planner::AddNuma() {
  const int64_t wanted = std::min(main_.bytes, (quick_ ? 1 : 4) * kGiB);
  for (int node = 0; node < static_cast<int>(machine_.numa_node_bytes.size()); ++node) {
    // At most half of the node: if a node gets full while memory is bound to it, the process is
    // killed.
    const int64_t half = machine_.numa_node_bytes[node] / 2 / kSpanStepBytes * kSpanStepBytes;
    const Allocation allocation{.numa_node = node, .bytes = std::min(wanted, half)};
    if (allocation.bytes == 0) continue;
    for (const Direction direction : kOneWay) {
      for (const Order order : kOrders) {
        Add(Experiment::kNuma, {.direction = direction, .order = order, .allocation = allocation});
      }
      Add(Experiment::kNuma, {.engine = Engine::kCopyEngine,
                              .direction = direction,
                              .row_bytes = kMiB,
                              .density = 1,
                              .allocation = allocation});
    }
  }
}

void Planner::AddPinning() {
  std::vector<int64_t> sizes = {kGiB};
  if (!quick_) sizes = {kGiB, 4 * kGiB, main_.bytes};
  for (int64_t& size : sizes) size = std::min(size, main_.bytes);
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  for (const int64_t bytes : sizes) {
    for (const Pinning pinning : kPinnings) {
      for (const Order order : kOrders) {
        Add(Experiment::kPinning,
            {.order = order, .allocation = Allocation{.pinning = pinning, .bytes = bytes}});
      }
    }
  }
}

void Planner::Add(Experiment experiment) {
  switch (experiment) {
    case Experiment::kPeak:
      return AddPeak();
    case Experiment::kEngines:
      return AddEngines();
    case Experiment::kRows:
      return AddRows();
    case Experiment::kSpans:
      return AddSpans();
    case Experiment::kDensity:
      return AddDensity();
    case Experiment::kSms:
      return AddSms();
    case Experiment::kDirections:
      return AddDirections();
    case Experiment::kNuma:
      return AddNuma();
    case Experiment::kPinning:
      return AddPinning();
  }
}

// The allocation that most measurements share.
absl::StatusOr<Allocation> MainAllocation(const PlanOptions& options, const Machine& machine) {
  Allocation main;
  int64_t available = machine.memory_available_bytes;
  std::string_view where = "available memory";
  const int node_count = static_cast<int>(machine.numa_node_bytes.size());
  if (node_count > 1 && machine.gpu_numa_node >= 0 && machine.gpu_numa_node < node_count) {
    main.numa_node = machine.gpu_numa_node;
    if (machine.numa_node_bytes[main.numa_node] < available) {
      available = machine.numa_node_bytes[main.numa_node];
      where = "memory of the GPU's NUMA node";
    }
  }
  main.bytes = options.span_bytes;
  if (main.bytes == 0) {
    const auto half = static_cast<uint64_t>(std::max<int64_t>(available / 2, 0));
    main.bytes =
        std::clamp(static_cast<int64_t>(std::bit_floor(half)), kSpanStepBytes, kSpanDefaultBytes);
  }
  if (main.bytes < 0 || main.bytes % kSpanStepBytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the span of ", main.bytes, " bytes is not a multiple of ", FormatBytes(kSpanStepBytes)));
  }
  if (main.bytes > available / 2) {
    return absl::ResourceExhaustedError(absl::StrCat("the span of ", FormatBytes(main.bytes),
                                                     " is more than half of the ", available / kMiB,
                                                     " MiB of ", std::string(where)));
  }
  // Row numbers have 32 bits.
  const int64_t span_bytes_max = int64_t{std::numeric_limits<uint32_t>::max()} * 128;
  if (main.bytes > span_bytes_max) {
    return absl::InvalidArgumentError(absl::StrCat("the span of ", FormatBytes(main.bytes),
                                                   " holds more than 2^32 rows of 128 B"));
  }
  return main;
}

}  // namespace

std::span<const Experiment> Experiments() { return kExperiments; }

absl::StatusOr<std::vector<Measurement>> MakePlan(const PlanOptions& options,
                                                  const Machine& machine) {
  const absl::StatusOr<Allocation> main = MainAllocation(options, machine);
  if (!main.ok()) return main.status();
  Planner planner(options, machine, *main);
  planner.Add(Experiment::kPeak);
  for (const Experiment experiment : kExperiments) {
    if (!options.experiment || *options.experiment == experiment) planner.Add(experiment);
  }
  return std::move(planner).Take();
}

}  // namespace spillway::bench

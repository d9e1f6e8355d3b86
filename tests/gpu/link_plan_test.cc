// What the link benchmark decides without a GPU: its plan, its lists of rows, and the pattern by
// which it checks the rows.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "bench/gpu/link/pattern.h"
#include "bench/gpu/link/pcie_link.h"
#include "bench/gpu/link/plan.h"
#include "bench/gpu/link/row_list.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace spillway::bench {
namespace {

using ::testing::Each;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGiB = int64_t{1} << 30;

Machine BigMachine() {
  return {.memory_available_bytes = 100 * kGiB,
          .numa_node_bytes = {128 * kGiB},
          .gpu_numa_node = -1,
          .sm_count = 132,
          .has_bulk = true,
          .has_batch = true};
}

Machine TwoNodes() {
  Machine machine = BigMachine();
  machine.numa_node_bytes = {64 * kGiB, 64 * kGiB};
  machine.gpu_numa_node = 1;
  return machine;
}

Machine SmallMachine() {
  return {.memory_available_bytes = 600 * kMiB,
          .numa_node_bytes = {kGiB},
          .gpu_numa_node = -1,
          .sm_count = 3,
          .has_bulk = false,
          .has_batch = false};
}

std::vector<Measurement> PlanOf(const PlanOptions& options, const Machine& machine) {
  absl::StatusOr<std::vector<Measurement>> plan = MakePlan(options, machine);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *std::move(plan) : std::vector<Measurement>();
}

std::vector<Measurement> Of(const std::vector<Measurement>& plan, Experiment experiment) {
  std::vector<Measurement> chosen;
  for (const Measurement& m : plan) {
    if (m.experiment == experiment) chosen.push_back(m);
  }
  return chosen;
}

void ExpectWithinBounds(const Measurement& m, const Machine& machine, int64_t span_bytes) {
  SCOPED_TRACE(Describe(m));
  EXPECT_TRUE(std::has_single_bit(static_cast<uint64_t>(m.row_bytes)));
  EXPECT_GE(m.row_bytes, 128);
  // No copy may cross the border of a registered segment.
  EXPECT_LE(m.row_bytes, kSpanStepBytes);
  EXPECT_GT(m.span_bytes, 0);
  EXPECT_LE(m.span_bytes, m.allocation.bytes);
  EXPECT_EQ(m.allocation.bytes % kSpanStepBytes, 0);
  EXPECT_LE(m.allocation.bytes, span_bytes);
  EXPECT_LE(m.allocation.bytes, machine.memory_available_bytes / 2);
  EXPECT_GE(m.row_count, 1);
  EXPECT_LE(m.row_count, m.domain_row_count);
  EXPECT_LE(m.domain_row_count, m.span_row_count());
  EXPECT_LE(m.span_row_count() * m.way_count() * m.row_bytes, m.span_bytes);
  // Row numbers have 32 bits, and so have the kernels' counts of 16-byte vectors.
  EXPECT_LE(m.span_bytes / m.row_bytes, std::numeric_limits<uint32_t>::max());
  EXPECT_LE(m.moved_bytes(), kMovedBytesMax);
  EXPECT_GT(m.density, 0);
  EXPECT_LE(m.density, 1);
  const bool kernel = m.engine == Engine::kSm || m.engine == Engine::kBulk;
  EXPECT_EQ(m.sm_count > 0, kernel);
  EXPECT_LE(m.sm_count, machine.sm_count);
  EXPECT_GE(m.allocation.numa_node, -1);
  EXPECT_LT(m.allocation.numa_node, static_cast<int>(machine.numa_node_bytes.size()));
  if (m.engine == Engine::kBulk) {
    EXPECT_TRUE(machine.has_bulk);
  }
  if (m.engine == Engine::kBatch) {
    EXPECT_TRUE(machine.has_batch);
  }
}

TEST(LinkPlanTest, EverythingStaysWithinBounds) {
  for (const Machine& machine : {BigMachine(), TwoNodes(), SmallMachine()}) {
    for (const bool quick : {false, true}) {
      for (const int64_t span_bytes : {int64_t{0}, 256 * kMiB}) {
        const auto plan = PlanOf({.quick = quick, .span_bytes = span_bytes}, machine);
        ASSERT_THAT(plan, Not(IsEmpty()));
        for (const Measurement& m : plan) {
          ExpectWithinBounds(m, machine, span_bytes == 0 ? 16 * kGiB : span_bytes);
        }
      }
    }
  }
}

TEST(LinkPlanTest, ASpanNeedNotBeAPowerOfTwo) {
  const int64_t span_bytes = 7 * kSpanStepBytes;
  const auto plan = PlanOf({.span_bytes = span_bytes}, BigMachine());
  std::set<int64_t> spans;
  for (const Measurement& m : plan) {
    ExpectWithinBounds(m, BigMachine(), span_bytes);
    if (m.experiment == Experiment::kSpans) spans.insert(m.span_bytes);
  }
  EXPECT_EQ(spans, (std::set<int64_t>{256 * kMiB, 512 * kMiB, kGiB, span_bytes}));
}

TEST(LinkPlanTest, OneExperimentComesWithThePeakAlone) {
  for (const Experiment experiment : Experiments()) {
    const auto plan = PlanOf({.experiment = experiment, .quick = true}, BigMachine());
    const auto peak = Of(plan, Experiment::kPeak);
    const auto asked = Of(plan, experiment);
    EXPECT_THAT(peak, SizeIs(3));
    EXPECT_THAT(asked, Not(IsEmpty())) << Name(experiment);
    EXPECT_EQ(plan.size(), peak.size() + asked.size());
    EXPECT_EQ(plan[0].experiment, Experiment::kPeak);
  }
}

TEST(LinkPlanTest, AllIsTheSumAndQuickIsLess) {
  for (const bool quick : {false, true}) {
    size_t sum = 3;
    for (const Experiment experiment : Experiments()) {
      sum += PlanOf({.experiment = experiment, .quick = quick}, BigMachine()).size() - 3;
    }
    EXPECT_EQ(PlanOf({.quick = quick}, BigMachine()).size(), sum);
  }
  const auto moved = [](bool quick) {
    int64_t bytes = 0;
    for (const Measurement& m : PlanOf({.quick = quick}, BigMachine())) bytes += m.moved_bytes();
    return bytes;
  };
  EXPECT_LT(PlanOf({.quick = true}, BigMachine()).size(), 200u);
  EXPECT_LT(PlanOf({}, BigMachine()).size(), 700u);
  EXPECT_LT(4 * moved(true), moved(false));
}

TEST(LinkPlanTest, CoversWhatItSays) {
  const auto plan = PlanOf({}, BigMachine());
  std::set<int64_t> row_sizes, spans;
  std::set<double> densities;
  std::set<int> sm_counts;
  std::set<std::string_view> engines, directions, orders, pinnings;
  for (const Measurement& m : plan) {
    if (m.experiment == Experiment::kEngines) row_sizes.insert(m.row_bytes);
    if (m.experiment == Experiment::kSpans) spans.insert(m.span_bytes);
    if (m.experiment == Experiment::kDensity) densities.insert(m.density);
    if (m.experiment == Experiment::kSms) sm_counts.insert(m.sm_count);
    engines.insert(Name(m.engine));
    directions.insert(Name(m.direction));
    orders.insert(Name(m.order));
    pinnings.insert(Name(m.allocation.pinning));
  }
  EXPECT_EQ(*row_sizes.begin(), 128);
  EXPECT_EQ(*row_sizes.rbegin(), kMiB);
  EXPECT_THAT(row_sizes, SizeIs(14));
  EXPECT_EQ(*spans.begin(), 256 * kMiB);
  EXPECT_EQ(*spans.rbegin(), 16 * kGiB);
  EXPECT_EQ(*densities.begin(), .0005);
  EXPECT_EQ(*densities.rbegin(), 1);
  EXPECT_EQ(*sm_counts.begin(), 1);
  EXPECT_EQ(*sm_counts.rbegin(), 132);
  EXPECT_THAT(engines, SizeIs(4));
  EXPECT_THAT(directions, SizeIs(3));
  EXPECT_THAT(orders, SizeIs(2));
  EXPECT_THAT(pinnings, SizeIs(3));
}

TEST(LinkPlanTest, AllocationsAreMadeOnceEach) {
  const auto plan = PlanOf({}, TwoNodes());
  size_t changes = 1;
  for (size_t i = 1; i < plan.size(); ++i) {
    changes += !(plan[i].allocation == plan[i - 1].allocation);
  }
  std::vector<Allocation> distinct;
  for (const Measurement& m : plan) {
    if (std::find(distinct.begin(), distinct.end(), m.allocation) == distinct.end()) {
      distinct.push_back(m.allocation);
    }
  }
  EXPECT_EQ(changes, distinct.size());
}

TEST(LinkPlanTest, TheSpanFollowsTheMemory) {
  const auto span = [](const Machine& machine) {
    return PlanOf({.experiment = Experiment::kRows}, machine)[0].allocation.bytes;
  };
  Machine machine = BigMachine();
  EXPECT_EQ(span(machine), 16 * kGiB);
  machine.memory_available_bytes = 20 * kGiB;
  EXPECT_EQ(span(machine), 8 * kGiB);
  machine.memory_available_bytes = 16 * kGiB;
  EXPECT_EQ(span(machine), 8 * kGiB);
  machine.memory_available_bytes = 512 * kMiB;
  EXPECT_EQ(span(machine), 256 * kMiB);
}

TEST(LinkPlanTest, RefusesMoreThanHalfOfTheMemory) {
  Machine machine = BigMachine();
  machine.memory_available_bytes = 32 * kGiB;
  EXPECT_TRUE(MakePlan({.span_bytes = 16 * kGiB}, machine).ok());
  machine.memory_available_bytes -= 1;
  const auto plan = MakePlan({.span_bytes = 16 * kGiB}, machine);
  EXPECT_TRUE(absl::IsResourceExhausted(plan.status())) << plan.status();
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr("16 GiB"));
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr("32767 MiB"));
  // Not even the smallest span fits.
  machine.memory_available_bytes = 511 * kMiB;
  EXPECT_TRUE(absl::IsResourceExhausted(MakePlan({}, machine).status()));
  machine.memory_available_bytes = 0;
  EXPECT_TRUE(absl::IsResourceExhausted(MakePlan({}, machine).status()));
}

TEST(LinkPlanTest, RefusesSpansThatDoNotFit) {
  for (const int64_t span_bytes : {int64_t{1}, 256 * kMiB + 4096, -256 * kMiB}) {
    EXPECT_TRUE(
        absl::IsInvalidArgument(MakePlan({.span_bytes = span_bytes}, BigMachine()).status()))
        << span_bytes;
  }
  Machine machine = BigMachine();
  machine.memory_available_bytes = std::numeric_limits<int64_t>::max();
  machine.numa_node_bytes = {machine.memory_available_bytes};
  // Rows of 128 bytes would need more than 32 bits for their numbers. No computation overflows.
  for (const int64_t span_bytes : {int64_t{1} << 39, int64_t{1} << 61}) {
    EXPECT_TRUE(absl::IsInvalidArgument(MakePlan({.span_bytes = span_bytes}, machine).status()));
  }
  const int64_t most = (int64_t{1} << 39) - kSpanStepBytes;
  for (const Measurement& m : PlanOf({.span_bytes = most}, machine)) {
    ExpectWithinBounds(m, machine, most);
  }
}

TEST(LinkPlanTest, BindsToTheGpusNodeWhereThereAreSeveral) {
  const auto plan = PlanOf({.experiment = Experiment::kRows}, TwoNodes());
  EXPECT_THAT(plan, Each(Field(&Measurement::allocation, Field(&Allocation::numa_node, 1))));
  const auto alone = PlanOf({.experiment = Experiment::kRows}, BigMachine());
  EXPECT_THAT(alone, Each(Field(&Measurement::allocation, Field(&Allocation::numa_node, -1))));
  // One node has less memory than the machine.
  Machine machine = TwoNodes();
  machine.numa_node_bytes = {90 * kGiB, 10 * kGiB};
  const auto bound = PlanOf({.experiment = Experiment::kRows}, machine);
  EXPECT_THAT(bound, Each(Field(&Measurement::allocation, Field(&Allocation::bytes, 4 * kGiB))));
  EXPECT_TRUE(absl::IsResourceExhausted(MakePlan({.span_bytes = 8 * kGiB}, machine).status()));
}

TEST(LinkPlanTest, NumaMeasuresEveryNodeThatHasMemory) {
  Machine machine = TwoNodes();
  machine.numa_node_bytes = {64 * kGiB, 64 * kGiB, 0, kGiB};
  const auto plan = Of(PlanOf({}, machine), Experiment::kNuma);
  std::set<std::pair<int, int64_t>> nodes;
  for (const Measurement& m : plan) nodes.insert({m.allocation.numa_node, m.allocation.bytes});
  EXPECT_EQ(nodes,
            (std::set<std::pair<int, int64_t>>{{0, 4 * kGiB}, {1, 4 * kGiB}, {3, 512 * kMiB}}));
}

TEST(LinkPlanTest, BothWaysShareTheSpan) {
  for (const Measurement& m : PlanOf({.experiment = Experiment::kDirections}, BigMachine())) {
    EXPECT_EQ(m.moved_bytes(), m.row_count * m.row_bytes * m.way_count());
    EXPECT_EQ(m.way_count(), m.direction == Direction::kBoth ? 2 : 1);
    EXPECT_EQ(m.span_row_count(), m.span_bytes / m.row_bytes / m.way_count());
  }
}

TEST(LinkPlanTest, ACutSortedListKeepsItsDensity) {
  for (const Measurement& m : PlanOf({}, BigMachine())) {
    if (m.order != Order::kSorted || m.row_count == 1) continue;
    const double density =
        static_cast<double>(m.row_count) / static_cast<double>(m.domain_row_count);
    // Rounding may change the count by a row.
    const double slack = 2.0 / static_cast<double>(m.domain_row_count);
    EXPECT_NEAR(density, m.density, m.density * 0.01 + slack) << Describe(m);
  }
}

TEST(LinkPlanTest, Descriptions) {
  const Measurement m{.experiment = Experiment::kDensity,
                      .engine = Engine::kSm,
                      .direction = Direction::kHostToDevice,
                      .order = Order::kShuffled,
                      .sm_count = 8,
                      .allocation = {.bytes = 16 * kGiB},
                      .span_bytes = 16 * kGiB,
                      .row_bytes = 512,
                      .density = .0005,
                      .row_count = 1,
                      .domain_row_count = 1};
  EXPECT_EQ(Describe(m), "density: sm h2d, 512 B rows, 0.05% shuffled of 16 GiB, 8 SMs");
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1536), "1536 B");
  EXPECT_EQ(FormatBytes(3 * kMiB), "3 MiB");
}

// A measurement of `row_count` rows within `domain` consecutive rows of a span of `span` rows.
Measurement Drawing(int64_t row_count, int64_t domain, int64_t span, Order order) {
  Measurement m;
  m.order = order;
  m.row_bytes = 512;
  m.span_bytes = span * 512;
  m.allocation.bytes = m.span_bytes;
  m.row_count = row_count;
  m.domain_row_count = domain;
  return m;
}

TEST(RowListTest, RowsAreDistinctOrderedAndWithinTheSpan) {
  for (const auto& [count, domain, span] :
       std::vector<std::tuple<int64_t, int64_t, int64_t>>{{1, 1, 1},
                                                          {1, 1000, 1000},
                                                          {1000, 1000, 1000},
                                                          {37, 100, 1000},
                                                          {999, 1000, 1001},
                                                          {20000, 100000, 300007}}) {
    for (const Order order : {Order::kSorted, Order::kShuffled}) {
      const Measurement m = Drawing(count, domain, span, order);
      for (int repetition = 0; repetition < 12; ++repetition) {
        const auto rows = DrawRows(m, Way::kFirst, repetition);
        ASSERT_THAT(rows, SizeIs(count));
        EXPECT_EQ(rows, DrawRows(m, Way::kFirst, repetition));
        std::vector<uint32_t> sorted = rows;
        std::sort(sorted.begin(), sorted.end());
        EXPECT_EQ(std::adjacent_find(sorted.begin(), sorted.end()), sorted.end());
        EXPECT_LT(sorted.back(), span);
        EXPECT_LT(sorted.back() - sorted.front(), domain);
        if (order == Order::kSorted) {
          EXPECT_EQ(rows, sorted);
        } else if (count > 30) {
          EXPECT_NE(rows, sorted);
        }
      }
    }
  }
}

TEST(RowListTest, RepetitionsShareNoRowsWhileThereAreOthers) {
  // 1000 rows have 10 stretches of 100; 3000 rows have 3 parts with 10 stretches each.
  for (const auto& [span, turns] : {std::pair<int64_t, int>{1000, 10}, {3000, 10}}) {
    const Measurement m = Drawing(100, 1000, span, Order::kSorted);
    std::set<uint32_t> seen;
    for (int repetition = 0; repetition < turns; ++repetition) {
      for (const uint32_t row : DrawRows(m, Way::kFirst, repetition)) {
        EXPECT_TRUE(seen.insert(row).second) << row << " in repetition " << repetition;
      }
    }
  }
}

TEST(RowListTest, TheTwoWaysShareNoRows) {
  Measurement m = Drawing(500, 500, 1000, Order::kShuffled);
  m.direction = Direction::kBoth;
  ASSERT_EQ(m.span_row_count(), 500);
  const auto read = DrawRows(m, Way::kFirst, 3);
  const auto written = DrawRows(m, Way::kSecond, 3);
  EXPECT_LT(*std::max_element(read.begin(), read.end()), 500u);
  EXPECT_GE(*std::min_element(written.begin(), written.end()), 500u);
  EXPECT_LT(*std::max_element(written.begin(), written.end()), 1000u);
}

TEST(RowListTest, RowsAreSpreadEvenly) {
  const Measurement m = Drawing(20000, 1000000, 1000000, Order::kSorted);
  std::vector<int> counts(100);
  for (const uint32_t row : DrawRows(m, Way::kFirst, 1)) ++counts[row / 10000];
  // 200 rows each, within five standard deviations.
  EXPECT_GE(*std::min_element(counts.begin(), counts.end()), 130);
  EXPECT_LE(*std::max_element(counts.begin(), counts.end()), 270);
}

TEST(RowListTest, TheQuickPlanDrawsWithinItsSpans) {
  for (const Measurement& m : PlanOf({.quick = true, .span_bytes = 512 * kMiB}, BigMachine())) {
    const auto rows = DrawRows(m, m.direction == Direction::kBoth ? Way::kSecond : Way::kFirst, 2);
    const auto most = static_cast<int64_t>(*std::max_element(rows.begin(), rows.end()));
    EXPECT_LE((most + 1) * m.row_bytes, m.span_bytes) << Describe(m);
  }
}

TEST(PermutationTest, IsABijection) {
  for (const uint64_t count : {1u, 2u, 3u, 5u, 64u, 65u, 1000u, 4096u, 65537u}) {
    for (const uint64_t seed : {0u, 7u}) {
      const Permutation permutation(count, seed);
      std::vector<bool> hit(count);
      for (uint64_t i = 0; i < count; ++i) {
        const uint64_t image = permutation(i);
        ASSERT_LT(image, count);
        ASSERT_FALSE(hit[image]) << image << " twice of " << count;
        hit[image] = true;
      }
    }
  }
  EXPECT_LE(Permutation(uint64_t{1} << 32, 1)(0xFFFFFFFF), 0xFFFFFFFFu);
}

TEST(PatternTest, TellsRowsFromOneAnother) {
  alignas(8) std::byte memory[64 * 128];
  FillPattern(memory);
  const std::vector<uint32_t> rows = {3, 60, 9, 63};
  EXPECT_EQ(FindWrongRow(memory, rows, 128), std::nullopt);
  PoisonRows(memory, std::vector<uint32_t>{9}, 128);
  EXPECT_EQ(FindWrongRow(memory, rows, 128), 2);
  EXPECT_EQ(FindWrongRow(memory, std::vector<uint32_t>{8, 10}, 128), std::nullopt);
  // A row that arrived in the place of another.
  FillPattern(memory);
  std::copy_n(memory + 60 * 128, 128, memory + 63 * 128);
  EXPECT_EQ(FindWrongRow(memory, rows, 128), 3);
  // One wrong word.
  FillPattern(memory);
  memory[3 * 128 + 127] ^= std::byte{1};
  EXPECT_EQ(FindWrongRow(memory, rows, 128), 0);
}

TEST(PcieLinkTest, Rates) {
  EXPECT_DOUBLE_EQ(PcieBytesPerSecond(1, 1), 250e6);
  EXPECT_NEAR(PcieBytesPerSecond(3, 16), 15.754e9, 1e6);
  EXPECT_NEAR(PcieBytesPerSecond(4, 16), 31.508e9, 1e6);
  EXPECT_NEAR(PcieBytesPerSecond(5, 16), 63.015e9, 1e6);
  EXPECT_NEAR(PcieBytesPerSecond(6, 16), 118e9, 1e6);
  EXPECT_EQ(PcieBytesPerSecond(0, 16), 0);
  EXPECT_EQ(PcieBytesPerSecond(7, 16), 0);
}

}  // namespace
}  // namespace spillway::bench

// Names and descriptions of the plan's values.
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "bench/gpu/link/plan.h"

namespace spillway::bench {

std::string_view Name(Experiment experiment) {
  switch (experiment) {
    case Experiment::kPeak:
      return "peak";
    case Experiment::kEngines:
      return "engines";
    case Experiment::kRows:
      return "rows";
    case Experiment::kSpans:
      return "spans";
    case Experiment::kDensity:
      return "density";
    case Experiment::kSms:
      return "sms";
    case Experiment::kDirections:
      return "directions";
    case Experiment::kNuma:
      return "numa";
    case Experiment::kPinning:
      return "pinning";
  }
  return "";
}

std::string_view Name(Engine engine) {
  switch (engine) {
    case Engine::kCopyEngine:
      return "copy_engine";
    case Engine::kSm:
      return "sm";
    case Engine::kBulk:
      return "bulk";
    case Engine::kBatch:
      return "batch";
  }
  return "";
}

std::string_view Name(Direction direction) {
  switch (direction) {
    case Direction::kHostToDevice:
      return "h2d";
    case Direction::kDeviceToHost:
      return "d2h";
    case Direction::kBoth:
      return "both";
  }
  return "";
}

std::string_view Name(Order order) { return order == Order::kSorted ? "sorted" : "shuffled"; }

std::string_view Name(Pinning pinning) {
  switch (pinning) {
    case Pinning::kHostAlloc:
      return "cuda_host_alloc";
    case Pinning::kHugePages:
      return "huge_pages";
    case Pinning::kSmallPages:
      return "small_pages";
  }
  return "";
}

std::string FormatBytes(int64_t bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes != 0 && bytes % 1024 == 0 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  return absl::StrCat(bytes, " ", kUnits[unit]);
}

std::string Describe(const Measurement& m) {
  std::string text = absl::StrCat(std::string(Name(m.experiment)), ": ",
                                  std::string(Name(m.engine)), " ", std::string(Name(m.direction)),
                                  ", ", FormatBytes(m.row_bytes), " rows, ", m.density * 100, "% ",
                                  std::string(Name(m.order)), " of ", FormatBytes(m.span_bytes));
  if (m.sm_count > 0) absl::StrAppend(&text, ", ", m.sm_count, m.sm_count == 1 ? " SM" : " SMs");
  if (m.experiment == Experiment::kNuma) absl::StrAppend(&text, ", node ", m.allocation.numa_node);
  if (m.experiment == Experiment::kPinning) {
    absl::StrAppend(&text, ", ", std::string(Name(m.allocation.pinning)));
  }
  return text;
}

}  // namespace spillway::bench

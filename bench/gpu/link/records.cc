#include "bench/gpu/link/records.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace spillway::bench {
namespace {

// REQUIRES: values is not empty.
double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

std::string CudaVersion(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

}  // namespace

Json DeviceRecord(const Gpu& gpu, const Topology& topology) {
  return {{"device", gpu.name},
          {"uuid", gpu.uuid},
          {"pci_bus_id", gpu.pci_bus_id},
          {"compute_capability",
           absl::StrCat(gpu.compute_capability_major, ".", gpu.compute_capability_minor)},
          {"sm_count", gpu.sm_count},
          {"numa_node", gpu.numa_node},
          {"driver_cuda_version", CudaVersion(gpu.driver_version)},
          {"cuda_version", CudaVersion(gpu.runtime_version)},
          {"host",
           {{"core_count", topology.core_count},
            {"numa_node_count", topology.numa_nodes.size()},
            {"memory_bytes", topology.memory_limit_bytes()},
            {"transparent_huge_pages", topology.transparent_huge_pages}}}};
}

Json LinkRecord(const std::optional<PcieLink>& link) {
  if (!link) return {{"link", nullptr}};
  return {{"link",
           {{"generation_max", link->generation_max},
            {"width_max", link->width_max},
            {"generation", link->generation},
            {"width", link->width},
            {"gb_per_s", PcieBytesPerSecond(link->generation_max, link->width_max) / 1e9}}}};
}

Json UnavailableRecord(Engine engine, std::string_view why) {
  return {{"unavailable", Name(engine)}, {"why", why}};
}

Json SkippedRecord(const Allocation& allocation, int measurement_count, std::string_view why) {
  return {{"skipped", measurement_count},
          {"pinning", Name(allocation.pinning)},
          {"numa_node", allocation.numa_node},
          {"why", why}};
}

Json ProgressRecord(size_t done, size_t total, std::string_view what) {
  return {{"progress", done}, {"total", total}, {"what", what}};
}

Json MeasurementRecord(const Measurement& m, const Outcome& outcome, const PinnedSpan& span) {
  Json record = {{"experiment", Name(m.experiment)},
                 {"engine", Name(m.engine)},
                 {"direction", Name(m.direction)},
                 {"row_bytes", m.row_bytes},
                 {"span_bytes", m.span_bytes},
                 {"density", m.density},
                 {"order", Name(m.order)},
                 {"sm_count", m.sm_count},
                 {"numa_node", m.allocation.numa_node},
                 {"pinning", Name(m.allocation.pinning)},
                 {"rows", m.moved_row_count()},
                 {"bytes", m.moved_bytes()}};
  const auto count = outcome.seconds.size();
  // These stay null in JSON if nothing was timed.
  Json median, least, most, gb_per_s, rows_per_s;
  if (outcome.checked && count > 0) {
    const double seconds = Median(outcome.seconds);
    median = seconds;
    least = *std::min_element(outcome.seconds.begin(), outcome.seconds.end());
    most = *std::max_element(outcome.seconds.begin(), outcome.seconds.end());
    gb_per_s = static_cast<double>(m.moved_bytes()) / seconds / 1e9;
    rows_per_s = static_cast<double>(m.moved_row_count()) / seconds;
  }
  record["seconds_median"] = median;
  record["seconds_min"] = least;
  record["seconds_max"] = most;
  record["repetitions"] = outcome.checked ? count : 0;
  record["gb_per_s"] = gb_per_s;
  record["rows_per_s"] = rows_per_s;
  record["checked"] = outcome.checked;
  record["allocation_bytes"] = m.allocation.bytes;
  record["huge_page_bytes"] = span.huge_page_bytes();
  record["pin_seconds"] = span.cost().seconds;
  record["register_seconds"] =
      span.cost().register_seconds ? Json(*span.cost().register_seconds) : Json();
  return record;
}

}  // namespace spillway::bench

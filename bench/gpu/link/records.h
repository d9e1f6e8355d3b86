#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "bench/gpu/link/gpu.h"
#include "bench/gpu/link/pcie_link.h"
#include "bench/gpu/link/pinned_span.h"
#include "bench/gpu/link/plan.h"
#include "bench/gpu/link/runner.h"
#include "host/memory/topology.h"
#include "nlohmann/json.hpp"

namespace spillway::bench {

// The lines of the program's output. Each is a JSON object, whose first key is the kind of the
// line. docs/link.md describes them.
using Json = nlohmann::ordered_json;

// "device": the GPU and its host.
Json DeviceRecord(const Gpu& gpu, const Topology& topology);

// "link": generations and widths of the link, and the rate at its maximum in 1e9 bytes per second;
// null if they are unknown.
Json LinkRecord(const std::optional<PcieLink>& link);

// "unavailable": an engine that is not measured, and the reason.
Json UnavailableRecord(Engine engine, std::string_view why);

// "skipped": measurements that are impossible on this machine, and the reason.
Json SkippedRecord(const Allocation& allocation, int measurement_count, std::string_view why);

// "progress": how many measurements are done, how many there are, and what runs next.
Json ProgressRecord(size_t done, size_t total, std::string_view what);

// "experiment": a measurement with all its parameters. Times and rates are null if its check
// failed.
Json MeasurementRecord(const Measurement& m, const Outcome& outcome, const PinnedSpan& span);

}  // namespace spillway::bench

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

// The lines of the program's output, a JSON object each. The first key says
// which kind of line it is; docs/link.md describes them.
using Json = nlohmann::ordered_json;

// "device": the GPU and its host.
Json DeviceRecord(const Gpu& gpu, const Topology& topology);

// "link": generations, widths and the rate of the widest in 1e9 bytes a
// second; null where nothing is known.
Json LinkRecord(const std::optional<PcieLink>& link);

// "unavailable": an engine that is left out, and why.
Json UnavailableRecord(Engine engine, std::string_view why);

// "skipped": measurements that could not be made here, and why.
Json SkippedRecord(const Allocation& allocation, int measurement_count, std::string_view why);

// "progress": how many measurements of how many are done, and what comes now.
Json ProgressRecord(size_t done, size_t total, std::string_view what);

// "experiment": a measurement with everything that it depends on. Times and
// rates are null for one whose check failed.
Json MeasurementRecord(const Measurement& m, const Outcome& outcome, const PinnedSpan& span);

}  // namespace spillway::bench

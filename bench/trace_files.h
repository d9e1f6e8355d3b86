#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "bench/mapped_file.h"
#include "host/model/model_spec.h"
#include "nlohmann/json.hpp"

namespace spillway::bench {

// A folder that bench/trace_data.py wrote.
struct TraceFiles {
  // INVALID_ARGUMENT if K or V does not have the size that follows from meta.json.
  static absl::StatusOr<TraceFiles> Open(const std::string& folder);

  nlohmann::ordered_json meta;
  ModelSpec spec;  // with one layer
  int64_t token_count;
  MappedFile k;        // [H_kv][tokens][d]
  MappedFile v;        // [H_kv][tokens][d]
  MappedFile queries;  // [lengths][queries per length][H_q][d] fp32
};

}  // namespace spillway::bench

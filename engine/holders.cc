#include "engine/holders.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/errors.h"

namespace spillway {
namespace {

using Holder = std::pair<int64_t, std::string>;  // bytes, name

// Kinds of use that hold memory, the largest first.
std::vector<Holder> Kinds(Engine& engine) {
  std::vector<Holder> kinds;
  for (int i = 0; i < kMemoryUseCount; ++i) {
    const auto use = static_cast<MemoryUse>(i);
    int64_t bytes = engine.budget().used_bytes(use);
    // Free slabs do not count.
    if (use == MemoryUse::kPages) bytes -= engine.arena().spare_bytes();
    if (bytes > 0) kinds.emplace_back(bytes, MemoryUseName(use));
  }
  std::sort(kinds.rbegin(), kinds.rend());
  return kinds;
}

// The sequence that holds the most bytes. If the memory of a device is exhausted (codes_alone),
// only codes count; else rows count, and codes if they are in host memory.
Holder LargestSequence(Engine& engine, bool codes_alone) {
  Holder largest;
  for (const auto& sequence :
       engine.registry().ListSequences(nullptr, "", std::numeric_limits<int64_t>::max()).items) {
    const SequenceSnapshot held = sequence->snapshot();
    const int64_t rows_bytes = codes_alone ? 0 : held.row_bytes;
    const bool codes_here = codes_alone || !engine.device().memory().has_value();
    largest =
        std::max(largest, Holder(rows_bytes + (codes_here ? held.index_bytes : 0), sequence->name));
  }
  return largest;
}

}  // namespace

absl::Status NameHolders(const absl::Status& status, Engine& engine) {
  const auto limit =
      status.GetPayload(absl::string_view(kMemoryLimitPayload.data(), kMemoryLimitPayload.size()));
  if (!limit.has_value()) return status;
  std::string message(status.message());
  const bool of_host =
      absl::EndsWith(std::string(*limit), absl::StrCat(" ", engine.budget().setting()));
  if (of_host) {
    const auto kinds = Kinds(engine);
    absl::StrAppend(&message, "; held by ",
                    absl::StrJoin(kinds, ", ", [](std::string* out, const Holder& kind) {
                      absl::StrAppend(out, kind.second, " ", kind.first);
                    }));
  }
  const Holder largest = LargestSequence(engine, /*codes_alone=*/!of_host);
  if (largest.first == 0) return WithMessage(status, message);
  absl::StrAppend(&message, "; the largest is ", largest.second, " with ", largest.first);
  return WithMetadata(WithMessage(status, message),
                      {{"largest_sequence", largest.second},
                       {"largest_sequence_bytes", absl::StrCat(largest.first)}});
}

}  // namespace spillway

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "host/base/selection.h"
#include "host/device/device.h"

namespace spillway {

// A result whose vectors have the sizes that the attend needs.
AttendResult AllocateResult(const ModelSpec& spec, const AttendQuery& attend);

// OUT_OF_RANGE names the first query and query head whose output is not finite, because sums of
// values exceed the range of fp32.
absl::Status CheckOutput(const ModelSpec& spec, int layer, const AttendResult& result);

// Splits an attend's queries, in order: dense(begin, end) takes each run of queries that are
// attended exactly, because the policy says so or no tokens are left for a tail; sparse(t) takes
// each other query.
template <typename Dense, typename Sparse>
void CutQueries(const ModelSpec& spec, const AttendQuery& attend, int layer, Dense dense,
                Sparse sparse) {
  int64_t begin = 0;  // queries [begin, t) are dense so far
  for (int64_t t = 0; t < attend.query_count; ++t) {
    if (attend.policy.IsDense(spec, layer, attend.query_count, attend.visible[t])) continue;
    if (begin < t) dense(begin, t);
    sparse(t);
    begin = t + 1;
  }
  if (begin < attend.query_count) dense(begin, attend.query_count);
}

// Collects the rows of one (query, group), in any order.
class SelectionBuilder {
 public:
  // A row of the sink, the window or the heavy set.
  void Add(int64_t token, uint8_t stratum) {
    rows_.push_back({static_cast<uint32_t>(token), 0, stratum});
  }
  // Rows of the tail's stratum h: all or some of the `drawn` rows that stand for its token_count
  // tokens.
  void AddSampled(std::span<const uint32_t> tokens, int h, int64_t drawn, int64_t token_count);
  Selection Build();

 private:
  struct Row {
    uint32_t token;
    float log_weight;
    uint8_t stratum;
  };
  std::vector<Row> rows_;
};

// Fills in what is known of dense queries [begin, end) without reading a row: their certificates,
// the number of rows that they touch and, with select_only, their selections.
void FillDenseResult(const ModelSpec& spec, const AttendQuery& attend, int64_t begin, int64_t end,
                     AttendResult& result);

}  // namespace spillway

// Exact attention over every visible row.

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "host/base/elements.h"
#include "host/base/parallel.h"
#include "host/cpu/attend_context.h"
#include "host/cpu/decoded_rows.h"
#include "host/cpu/group_sums.h"
#include "host/device/errors.h"
#include "host/device/results.h"

namespace spillway {
namespace {

constexpr int64_t kQueriesPerTask = 16;
constexpr int64_t kRangeRowsMin = 2048;
constexpr int64_t kRangesMax = 64;
constexpr int64_t kRowsBetweenPauses = 256;

// Rows of one task. They depend on the length alone, so that the order of every sum does too.
int64_t RangeRows(int64_t n) {
  const int64_t even = (n + kRangesMax - 1) / kRangesMax;
  return std::max(kRangeRowsMin, (even + kPageTokenCount - 1) / kPageTokenCount * kPageTokenCount);
}

// Sums of a block of queries over a range of rows.
struct Partial {
  GroupSums sums;  // of queries * G heads
  absl::Status status;
};

// Rows [begin, end) of a KV head.
struct Range {
  int kv_head;
  int64_t begin;
  int64_t end;
};

// following: the range that this thread probably takes next; null: none. Its first rows are fetched
// while the last ones of this range are folded: otherwise each range begins with a wait for memory.
void AttendRange(const AttendContext& c, const Range& range, const Range* following,
                 int64_t query_begin, int64_t query_end, const GroupQueries& q, Partial& partial) {
  const auto [kv_head, row_begin, row_end] = range;
  const ModelSpec& spec = c.spec();
  const LayerRows& rows = *c.attend->rows;
  const int group = spec.query_heads_per_kv_head();
  const int d = spec.head_dim;
  const int heads = static_cast<int>(query_end - query_begin) * group;
  partial.sums = GroupSums(heads, d, /*moments=*/false);
  std::vector<float> logits(static_cast<size_t>(heads) * kRowBlock);
  std::vector<int> counts(heads);
  // Row pointers of this block and of the next one.
  const std::byte* buffers[2][kRowBlock];
  const std::byte** pointers = buffers[0];
  const std::byte** next = buffers[1];
  const auto point = [&](const Range& of, int64_t base, const std::byte** out) {
    const std::byte* first = rows.Row(of.kv_head, base);
    const int64_t last = of.end - 1 - base;
    for (int64_t i = 0; i < kRowBlock; ++i) out[i] = first + std::min(i, last) * rows.row_bytes();
  };
  DecodedRows decoded(rows.format());
  for (int64_t base = row_begin; base < row_end; base += kRowBlock) {
    if ((base - row_begin) % kRowsBetweenPauses == 0) {
      partial.status = c.Pause();
      if (!partial.status.ok()) return;
    }
    const int count = static_cast<int>(std::min<int64_t>(kRowBlock, row_end - base));
    std::swap(pointers, next);
    if (base == row_begin) point(range, base, pointers);
    const bool more = base + kRowBlock < row_end;
    if (more) {
      point(range, base + kRowBlock, next);
    } else if (following != nullptr) {
      point(*following, following->begin, next);
    }
    const std::byte* const* following_rows = more || following != nullptr ? next : nullptr;
    const std::byte* const* elements = decoded.Of(pointers, following_rows, count);
    const std::byte* const* ahead = decoded.Ahead(following_rows);
    for (int h = 0; h < heads; ++h) {
      const int64_t visible = c.attend->visible[query_begin + h / group];
      counts[h] = static_cast<int>(std::clamp<int64_t>(visible - base, 0, count));
    }
    if (!RowLogits(spec.dtype, elements, ahead, count, q.rows(), logits.data())) {
      std::vector<uint32_t> tokens(count);
      std::iota(tokens.begin(), tokens.end(), static_cast<uint32_t>(base));
      // Rows beyond a query's visible length may have any logit.
      for (int h = 0; h < heads && partial.status.ok(); ++h) {
        partial.status =
            NonFiniteLogit(c, kv_head, logits.data() + h * kRowBlock, tokens.data(), counts[h]);
      }
      if (!partial.status.ok()) return;
    }
    FoldRows(spec.dtype, elements, ahead, count, counts.data(), heads, d, logits.data(),
             partial.sums.sums.data(), partial.sums.Target({}));
  }
}

}  // namespace

GroupQueries::GroupQueries(const AttendContext& c, int first_head, int head_count,
                           int64_t query_begin, int64_t query_end)
    : head_dim_(c.spec().head_dim), scale_(static_cast<float>(c.spec().softmax_scale)) {
  const ModelSpec& spec = c.spec();
  const int64_t width = int64_t{head_count} * spec.head_dim;
  const int64_t first = int64_t{first_head} * spec.head_dim;
  const int64_t stride = int64_t{spec.query_head_count} * spec.head_dim;
  const int64_t count = (query_end - query_begin) * width;
  raw_.resize(count);
  for (int64_t t = query_begin; t < query_end; ++t) {
    ToFloat(c.attend->q_dtype, c.attend->q + (t * stride + first) * DTypeBytes(c.attend->q_dtype),
            width, raw_.data() + (t - query_begin) * width);
  }
  scaled_.resize(count);
  for (int64_t i = 0; i < count; ++i) scaled_[i] = raw_[i] * scale_;
  if (spec.dtype != DType::kBF16) return;
  bf16_.resize(count);
  uint32_t lost = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(raw_[i]);
    bf16_[i] = static_cast<uint16_t>(bits >> 16);
    lost |= bits & 0xFFFFu;
  }
  if (lost != 0) bf16_.clear();
}

RowQueries GroupQueries::rows() const {
  return {static_cast<int>(raw_.size() / head_dim_), head_dim_, scale_, scaled_.data(),
          bf16_.empty() ? nullptr : bf16_.data()};
}

absl::Status NonFiniteLogit(const AttendContext& c, int kv_head, const float* logits,
                            const uint32_t* tokens, int count) {
  for (int i = 0; i < count; ++i) {
    if (std::isfinite(logits[i])) continue;
    return NonFiniteLogitError(tokens[i], c.layer, kv_head);
  }
  return absl::OkStatus();
}

absl::Status AttendDense(const AttendContext& c, int64_t query_begin, int64_t query_end) {
  const ModelSpec& spec = c.spec();
  const AttendQuery& attend = *c.attend;
  AttendResult& result = *c.result;
  const int kv_heads = spec.kv_head_count;
  // All query heads of a KV head: they read the same rows.
  const int group = spec.query_heads_per_kv_head();
  const int d = spec.head_dim;
  FillDenseResult(spec, attend, query_begin, query_end, result);
  if (attend.select_only) return absl::OkStatus();

  const int64_t queries = query_end - query_begin;
  const int64_t blocks = (queries + kQueriesPerTask - 1) / kQueriesPerTask;
  const int64_t n =
      *std::max_element(attend.visible.begin() + query_begin, attend.visible.begin() + query_end);
  // Many queries give enough tasks without cutting the rows into ranges.
  const int64_t range_rows = blocks > 1 ? n : RangeRows(n);
  const int64_t ranges = (n + range_rows - 1) / range_rows;
  std::vector<GroupQueries> q(kv_heads * blocks);
  std::vector<Partial> partials(kv_heads * blocks * ranges);
  const auto bounds = [&](int64_t block) {
    const int64_t begin = query_begin + block * kQueriesPerTask;
    return std::pair(begin, std::min(begin + kQueriesPerTask, query_end));
  };
  for (int64_t task = 0; task < kv_heads * blocks; ++task) {
    const auto [begin, end] = bounds(task % blocks);
    q[task] = GroupQueries(c, static_cast<int>(task / blocks) * group, group, begin, end);
  }
  const auto range_of = [&](int64_t i) -> Range {
    const int64_t begin = (i % ranges) * range_rows;
    return {static_cast<int>(i / ranges / blocks), begin, std::min(begin + range_rows, n)};
  };
  // Threads take ranges in turn.
  const int threads = LoopThreads();
  const auto run = [&](int64_t i) {
    const int64_t task = i / ranges;
    const auto [begin, end] = bounds(task % blocks);
    const bool is_last = i + threads >= static_cast<int64_t>(partials.size());
    const Range following = range_of(is_last ? i : i + threads);
    AttendRange(c, range_of(i), is_last ? nullptr : &following, begin, end, q[task], partials[i]);
  };
  c.loops.Run(static_cast<int64_t>(partials.size()), run);
  for (int64_t task = 0; task < kv_heads * blocks; ++task) {
    const int kv_head = static_cast<int>(task / blocks);
    const auto [begin, end] = bounds(task % blocks);
    GroupSums& total = partials[task * ranges].sums;
    for (int64_t r = 0; r < ranges; ++r) {
      if (!partials[task * ranges + r].status.ok()) return partials[task * ranges + r].status;
    }
    for (int64_t r = 1; r < ranges; ++r) total.Merge(partials[task * ranges + r].sums);
    for (int64_t i = 0; i < (end - begin) * group; ++i) {
      const int64_t at = (begin + i / group) * spec.query_head_count + kv_head * group + i % group;
      const float sink = spec.SinkLogit(c.layer, kv_head * group + i % group);
      const float keep = total.sums[i].Merge({sink, 1, 0, 0}).keep;
      const float inverse = keep / total.sums[i].sum;
      for (int j = 0; j < d; ++j) result.out[at * d + j] = total.value[i * d + j] * inverse;
      result.lse[at] = total.sums[i].max + std::log(total.sums[i].sum);
    }
  }
  return absl::OkStatus();
}

}  // namespace spillway

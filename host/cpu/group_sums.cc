#include "host/cpu/group_sums.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "host/base/parallel.h"
#include "host/base/status_macros.h"
#include "host/cpu/decoded_rows.h"
#include "host/cpu/kernels.h"
#include "host/cpu/value_pass.h"

namespace spillway {
namespace {

// Rows that one task folds.
constexpr int64_t kFoldTaskRows = 512;

// Folds tokens into `sums`, which are empty at first, in this thread. first: index of tokens[0]
// among all folded tokens.
absl::Status FoldTask(const AttendContext& context, int kv_head, const GroupQueries& queries,
                      const ValueTerms& values, std::span<const uint32_t> tokens, int64_t first,
                      const FoldOptions& options, GroupSums& sums) {
  RETURN_IF_ERROR(context.CheckCancelled());
  const LayerRows& rows = *context.attend->rows;
  const DType dtype = context.spec().dtype;
  const int group = context.spec().group();
  const int d = context.spec().head_dim;
  const auto count = static_cast<int64_t>(tokens.size());
  float logits[kGroupMax * kRowBlock];
  // Row pointers of this block and of the next one. Rows lie far apart, so each is prefetched a
  // block ahead to hide its latency.
  const std::byte* buffers[2][kRowBlock];
  const auto point = [&](int64_t at, const std::byte** out) {
    for (int64_t i = 0; i < kRowBlock; ++i) {
      out[i] = rows.Row(kv_head, tokens[std::min(at + i, count - 1)]);
    }
  };
  point(0, buffers[0]);
  for (int64_t i = 0; i < std::min<int64_t>(kRowBlock, count); ++i) {
    PrefetchRow(buffers[0][i], rows.row_bytes());
  }
  DecodedRows decoded(rows.format());
  const auto block = options.codes == nullptr ? nullptr : std::make_unique<ValuePass::Block>();
  int current = 0;
  for (int64_t at = 0; at < count; at += kRowBlock, current ^= 1) {
    const int m = static_cast<int>(std::min<int64_t>(kRowBlock, count - at));
    const std::byte** pointers = buffers[current];
    const std::byte** next = at + kRowBlock < count ? buffers[current ^ 1] : nullptr;
    if (next != nullptr) point(at + kRowBlock, next);
    const std::byte* const* elements = decoded.Of(pointers, next, m);
    const std::byte* const* ahead = decoded.Ahead(next);
    if (!RowLogits(dtype, elements, ahead, m, queries.rows(), logits)) {
      for (int g = 0; g < group; ++g) {
        RETURN_IF_ERROR(
            NonFiniteLogit(context, kv_head, logits + g * kRowBlock, tokens.data() + at, m));
      }
    }
    if (options.weigher != nullptr) options.weigher->Weigh(first + at, m, elements, logits);
    if (options.codes != nullptr) {
      FoldResiduals(dtype, elements, m, group, d, logits,
                    options.codes->RowsOf(tokens.subspan(at, m), *block), sums.sums.data(),
                    sums.Target(values));
      continue;
    }
    FoldRows(dtype, elements, ahead, m, nullptr, group, d, logits, sums.sums.data(),
             sums.Target(values));
  }
  return absl::OkStatus();
}

}  // namespace

void GroupSums::Merge(const GroupSums& from) {
  for (size_t head = 0; head < sums.size(); ++head) {
    if (from.sums[head].count == 0) continue;
    const SoftmaxSums::Factors factors = sums[head].Merge(from.sums[head]);
    sums[head].count += from.sums[head].count;
    const auto add = [&](std::vector<float>& to, const std::vector<float>& other, float keep,
                         float take) {
      const size_t each = to.size() / sums.size();
      for (size_t i = head * each; i < (head + 1) * each; ++i) {
        to[i] = std::fma(to[i], keep, other[i] * take);
      }
    };
    add(value, from.value, factors.keep, factors.take);
    if (!moments()) continue;
    add(value_sq, from.value_sq, factors.keep * factors.keep, factors.take * factors.take);
    add(projected, from.projected, factors.keep * factors.keep, factors.take * factors.take);
  }
}

ValueSums GroupSums::Target(const ValueTerms& terms) {
  return {.inverse_unit = 1 / terms.unit,
          .value = value.data(),
          .value_sq = moments() ? value_sq.data() : nullptr,
          .projected = projected.data(),
          .signs = terms.signs.data()};
}

absl::Status FoldTokens(const AttendContext& context, int kv_head, const GroupQueries& queries,
                        const ValueTerms& values, std::span<const uint32_t> tokens, GroupSums& into,
                        const FoldOptions& options) {
  const auto count = static_cast<int64_t>(tokens.size());
  const int64_t tasks = (count + kFoldTaskRows - 1) / kFoldTaskRows;
  std::vector<GroupSums> parts(
      tasks, GroupSums(static_cast<int>(into.sums.size()), into.head_dim, into.moments()));
  std::vector<absl::Status> statuses(tasks);
  ParallelFor(int64_t{0}, tasks, [&](int64_t task) {
    const int64_t first = task * kFoldTaskRows;
    statuses[task] = FoldTask(context, kv_head, queries, values,
                              tokens.subspan(first, std::min(kFoldTaskRows, count - first)), first,
                              options, parts[task]);
  });
  for (int64_t task = 0; task < tasks; ++task) {
    RETURN_IF_ERROR(statuses[task]);
    into.Merge(parts[task]);
  }
  return absl::OkStatus();
}

}  // namespace spillway

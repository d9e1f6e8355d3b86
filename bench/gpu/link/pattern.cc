#include "bench/gpu/link/pattern.h"

#include <algorithm>
#include <limits>

#include "tbb/blocked_range.h"
#include "tbb/parallel_for.h"
#include "tbb/parallel_reduce.h"

namespace spillway::bench {
namespace {

constexpr int64_t kWordBytes = sizeof(uint64_t);

uint64_t* Words(std::span<std::byte> span) { return reinterpret_cast<uint64_t*>(span.data()); }

const uint64_t* Words(std::span<const std::byte> span) {
  return reinterpret_cast<const uint64_t*>(span.data());
}

}  // namespace

void FillPattern(std::span<std::byte> span) {
  uint64_t* const words = Words(span);
  tbb::parallel_for(tbb::blocked_range<uint64_t>(0, span.size() / kWordBytes, 1 << 16),
                    [words](const auto& range) {
                      for (uint64_t i = range.begin(); i < range.end(); ++i) {
                        words[i] = PatternWord(i);
                      }
                    });
}

void PoisonRows(std::span<std::byte> span, std::span<const uint32_t> rows, int64_t row_bytes) {
  const auto row_words = static_cast<uint64_t>(row_bytes / kWordBytes);
  uint64_t* const words = Words(span);
  tbb::parallel_for(tbb::blocked_range<size_t>(0, rows.size()), [&](const auto& range) {
    for (size_t i = range.begin(); i < range.end(); ++i) {
      const uint64_t first = rows[i] * row_words;
      for (uint64_t w = first; w < first + row_words; ++w) words[w] = ~PatternWord(w);
    }
  });
}

std::optional<int64_t> FindWrongRow(std::span<const std::byte> span, std::span<const uint32_t> rows,
                                    int64_t row_bytes) {
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  const auto row_words = static_cast<uint64_t>(row_bytes / kWordBytes);
  const uint64_t* const words = Words(span);
  const int64_t wrong = tbb::parallel_reduce(
      tbb::blocked_range<size_t>(0, rows.size()), kNone,
      [&](const auto& range, int64_t found) {
        for (size_t i = range.begin(); i < range.end(); ++i) {
          const uint64_t first = rows[i] * row_words;
          for (uint64_t w = first; w < first + row_words; ++w) {
            if (words[w] != PatternWord(w)) return std::min(found, static_cast<int64_t>(i));
          }
        }
        return found;
      },
      [](int64_t a, int64_t b) { return std::min(a, b); });
  return wrong == kNone ? std::nullopt : std::optional(wrong);
}

}  // namespace spillway::bench

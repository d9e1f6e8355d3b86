#include "bench/cpu/plain_read.h"

#include <tbb/parallel_for.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>

namespace spillway::bench {
namespace {

constexpr int kLineBytes = 64;

// One loop reads stream_count parts of the spans at the same time and prefetches each part
// ahead_line_count cache lines ahead.
struct Loop {
  int stream_count;
  int ahead_line_count;
};
constexpr Loop kLoops[] = {{1, 0}, {1, 4}, {1, 16}, {1, 64}, {2, 0}, {2, 16}, {4, 0}, {4, 16}};

template <int kStreams, bool kAhead>
uint64_t Read(std::span<const std::byte* const> spans, int64_t bytes, int ahead_line_count) {
  const int64_t lines = bytes / kLineBytes;
  const size_t part = (spans.size() + kStreams - 1) / kStreams;
  uint64_t sums[8] = {};
  for (size_t i = 0; i < part; ++i) {
    const std::byte* here[kStreams];
    const std::byte* next[kStreams];
    int count = 0;
    for (int s = 0; s < kStreams; ++s) {
      const size_t at = s * part + i;
      if (at >= spans.size()) break;
      here[count] = spans[at];
      next[count++] = spans[std::min(at + 1, spans.size() - 1)];
    }
    const auto read = [&](int streams) {
      for (int64_t line = 0; line < lines; ++line) {
        for (int s = 0; s < streams; ++s) {
          if constexpr (kAhead) {
            const int64_t ahead = line + ahead_line_count;
            __builtin_prefetch(ahead < lines ? here[s] + ahead * kLineBytes
                                             : next[s] + (ahead - lines) * kLineBytes);
          }
          const auto* words = reinterpret_cast<const uint64_t*>(here[s] + line * kLineBytes);
          for (int w = 0; w < 8; ++w) sums[w] ^= words[w];
        }
      }
    };
    // Pass a constant where possible, so that the compiler unrolls the loop over streams.
    if (count == kStreams) {
      read(kStreams);
    } else {
      read(count);
    }
  }
  uint64_t sum = 0;
  for (uint64_t x : sums) sum ^= x;
  return sum;
}

uint64_t Read(const Loop& loop, std::span<const std::byte* const> spans, int64_t bytes) {
  const int ahead = loop.ahead_line_count;
  switch (loop.stream_count) {
    case 1:
      return ahead > 0 ? Read<1, true>(spans, bytes, ahead) : Read<1, false>(spans, bytes, 0);
    case 2:
      return ahead > 0 ? Read<2, true>(spans, bytes, ahead) : Read<2, false>(spans, bytes, 0);
    default:
      return ahead > 0 ? Read<4, true>(spans, bytes, ahead) : Read<4, false>(spans, bytes, 0);
  }
}

}  // namespace

double PlainReadSeconds(tbb::task_arena& threads, std::span<const std::byte* const> spans,
                        int64_t bytes, CacheFlush& flush) {
  static std::atomic<uint64_t> sum{0};  // uses the values, so that the compiler keeps every read
  // Several slices per thread, so that the threads do not all wait for a slow one at the end.
  const size_t slice =
      std::max<size_t>(16, spans.size() / (8 * static_cast<size_t>(threads.max_concurrency())));
  double least = std::numeric_limits<double>::infinity();
  for (const Loop& loop : kLoops) {
    flush.Run();
    const auto start = std::chrono::steady_clock::now();
    threads.execute([&] {
      tbb::parallel_for(tbb::blocked_range<size_t>(0, spans.size(), slice), [&](const auto& range) {
        const auto part = spans.subspan(range.begin(), range.size());
        sum.fetch_add(Read(loop, part, bytes), std::memory_order_relaxed);
      });
    });
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    least = std::min(least, spent.count());
  }
  return least;
}

}  // namespace spillway::bench

#pragma once

#include <tbb/task_arena.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace spillway::bench {

// Empties the caches: reads and writes a buffer of its own that is several times as large as the
// last-level cache, so that the next measurement starts with cold caches.
class CacheFlush {
 public:
  explicit CacheFlush(int64_t bytes = int64_t{128} << 20) : data_(bytes / 8) {}
  void Run() {
    for (uint64_t& word : data_) ++word;
  }

 private:
  std::vector<uint64_t> data_;
};

// Describes how PlainReadSeconds measures, for reports.
inline constexpr std::string_view kPlainReadHow =
    "the fastest of 8 loops, which read 1, 2 or 4 streams of memory and prefetch nothing or 1 KiB "
    "ahead, or read 1 stream and prefetch 256 B or 4 KiB ahead";

// Reads `bytes` bytes, a multiple of 64, at each address in `spans`, in parallel and from cold
// caches, and does nothing else with them. Each of several loops reads all of them once. Returns
// the seconds of the fastest loop: the result serves as a lower bound on the time of a kernel,
// which may be faster than some of the loops.
double PlainReadSeconds(tbb::task_arena& threads, std::span<const std::byte* const> spans,
                        int64_t bytes, CacheFlush& flush);

}  // namespace spillway::bench

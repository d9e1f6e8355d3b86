#pragma once

#include <tbb/task_arena.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace spillway::bench {

// Reads and writes memory of its own, several times what the last-level cache
// holds, so that what is measured next starts cold.
class CacheFlush {
 public:
  explicit CacheFlush(int64_t bytes = int64_t{128} << 20) : data_(bytes / 8) {}
  void Run() {
    for (uint64_t& word : data_) ++word;
  }

 private:
  std::vector<uint64_t> data_;
};

// What a plain read's time is, for people.
inline constexpr std::string_view kPlainReadHow =
    "the fastest of 8 loops, which read 1, 2 or 4 streams of memory and prefetch nothing or 1 KiB "
    "ahead, or read 1 stream and prefetch 256 B or 4 KiB ahead";

// Reads every byte of `bytes`, a multiple of 64, at each of `spans`, and
// computes nothing of them: each of several loops reads them once from cold
// caches, in parallel. Returns the seconds of the fastest, for a loop that a
// kernel beats is no floor.
double PlainReadSeconds(tbb::task_arena& threads, std::span<const std::byte* const> spans,
                        int64_t bytes, CacheFlush& flush);

}  // namespace spillway::bench

#pragma once

#include <atomic>
#include <cstdint>

#include "host/memory/arena.h"

namespace spillway {

// Bounds the slabs that some pools take of an arena which they share with others: at most
// limit_bytes, and only while the arena keeps spare_bytes free for the others. Thread-safe.
class SlabLimit {
 public:
  // The arena must outlive this object.
  SlabLimit(Arena* arena, int64_t limit_bytes, int64_t spare_bytes)
      : arena_(arena), limit_bytes_(limit_bytes), spare_bytes_(spare_bytes) {}
  SlabLimit(const SlabLimit&) = delete;
  SlabLimit& operator=(const SlabLimit&) = delete;

  // Counts slabs that are about to be taken. False, and counts none, if they are too many.
  bool Take(int64_t slab_count);
  // Counts slabs that were given back, or not taken after all.
  void Give(int64_t slab_count);

  int64_t limit_bytes() const { return limit_bytes_; }
  int64_t used_bytes() const { return used_bytes_.load(std::memory_order_relaxed); }
  // Bytes that can still be taken. Negative if fewer than the spare bytes are free.
  int64_t free_bytes() const;

 private:
  Arena* const arena_;
  const int64_t limit_bytes_;
  const int64_t spare_bytes_;
  std::atomic<int64_t> used_bytes_ = 0;
};

}  // namespace spillway

#include "host/memory/slab_limit.h"

#include <algorithm>

namespace spillway {

bool SlabLimit::Take(int64_t slab_count) {
  const int64_t bytes = slab_count * kSlabBytes;
  if (arena_->free_bytes() - spare_bytes_ < bytes) return false;
  if (used_bytes_.fetch_add(bytes, std::memory_order_relaxed) + bytes <= limit_bytes_) return true;
  Give(slab_count);
  return false;
}

void SlabLimit::Give(int64_t slab_count) {
  used_bytes_.fetch_sub(slab_count * kSlabBytes, std::memory_order_relaxed);
}

int64_t SlabLimit::free_bytes() const {
  return std::min(arena_->free_bytes() - spare_bytes_, limit_bytes_ - used_bytes());
}

}  // namespace spillway

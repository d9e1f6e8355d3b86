#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "host/base/mutex.h"
#include "host/memory/page_pool.h"

namespace spillway::cuda {

// Blocks of GPU memory of any size, for tables and centres: one page pool per power of two.
// Thread-safe.
class BlockPools {
 public:
  // REQUIRES: called before Of().
  void SetArena(Arena* arena) { arena_ = arena; }
  // The pool of the smallest pages that hold `bytes`.
  PagePool* Of(int64_t bytes);

 private:
  Arena* arena_ = nullptr;
  Mutex mutex_;
  std::map<int64_t, std::unique_ptr<PagePool>> pools_ ABSL_GUARDED_BY(mutex_);
};

// A page of such a pool, or none. Move-only.
class Block {
 public:
  static absl::StatusOr<Block> Create(PagePool* pool);
  // The same block, with one more reference.
  Block Share() const;
  Block() = default;
  Block(Block&& o) noexcept { *this = std::move(o); }
  Block& operator=(Block&& o) noexcept {
    std::swap(pool_, o.pool_);
    std::swap(page_, o.page_);
    return *this;
  }
  ~Block() {
    if (page_) pool_->Release(page_);
  }
  explicit operator bool() const { return static_cast<bool>(page_); }
  std::byte* data() const { return pool_->Data(page_); }
  int64_t bytes() const { return page_ ? pool_->page_bytes() : 0; }

 private:
  PagePool* pool_ = nullptr;
  PageRef page_;
};

}  // namespace spillway::cuda

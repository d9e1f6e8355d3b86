#include "gpu/device/block.h"

#include <algorithm>
#include <bit>

namespace spillway::cuda {
namespace {

constexpr int64_t kBlockBytesMin = 4096;

}  // namespace

PagePool* BlockPools::Of(int64_t bytes) {
  const auto size =
      static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max(bytes, kBlockBytesMin))));
  const MutexLock lock(mutex_);
  std::unique_ptr<PagePool>& pool = pools_[size];
  if (pool == nullptr) pool = std::make_unique<PagePool>(arena_, size);
  return pool.get();
}

absl::StatusOr<Block> Block::Create(PagePool* pool) {
  const absl::StatusOr<PageRef> page = pool->Allocate();
  if (!page.ok()) return page.status();
  Block block;
  block.pool_ = pool;
  block.page_ = *page;
  return block;
}

Block Block::Share() const {
  Block block;
  if (!page_) return block;
  pool_->AddReference(page_);
  block.pool_ = pool_;
  block.page_ = page_;
  return block;
}

}  // namespace spillway::cuda

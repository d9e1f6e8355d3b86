#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "gpu/device/model.h"
#include "gpu/kernels/attend.h"
#include "host/memory/page_table.h"

namespace spillway::cuda {

// Blocks of GPU memory of any size, for tables and centres: a page pool for
// each power of two. Thread-safe.
class BlockPools {
 public:
  // REQUIRES: before Of().
  void SetArena(Arena* arena) { arena_ = arena; }
  // The pool whose pages hold `bytes`.
  PagePool* Of(int64_t bytes);

 private:
  Arena* arena_ = nullptr;
  absl::Mutex mutex_;
  std::map<int64_t, std::unique_ptr<PagePool>> pools_ ABSL_GUARDED_BY(mutex_);
};

// A block of a pool, or none. Move-only.
class Block {
 public:
  static absl::StatusOr<Block> Create(PagePool* pool);
  // The same block, counted once more.
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

// What the GPU knows of one layer of a sequence: the addresses of row and
// code pages, codes, and the centre.
class LayerIndex {
 public:
  LayerIndex(const CudaModel& model, BlockPools* blocks);
  // The first token_count tokens of another layer, pages shared.
  LayerIndex(const CudaModel& model, BlockPools* blocks, const LayerIndex& source,
             int64_t token_count);

  bool centred() const { return centred_; }
  int64_t coded_token_count() const { return coded_token_count_; }
  // Codes and tables in GPU memory.
  int64_t bytes() const;

  // Room for the codes and addresses of tokens up to start + count; see
  // Device::PrepareAppend. RESOURCE_EXHAUSTED.
  absl::Status Prepare(int64_t start, int64_t count);
  void Truncate(int64_t token_count);

  // Adds what the GPU's tables lack of the pages of rows and codes. Room for
  // rows was prepared, or is made now. RESOURCE_EXHAUSTED.
  absl::Status Update(const LayerRows& rows, std::vector<TableUpdate>& updates);
  // Says that tokens up to token_count are encoded, the centre known.
  void SetCoded(int64_t token_count) {
    centred_ = true;
    coded_token_count_ = token_count;
  }

  // Device addresses, valid until the next Prepare or Update.
  const std::byte* const* row_pages(int kv_head) const;
  std::byte* const* code_pages(int kv_head) const;
  int64_t page_capacity() const { return capacity_; }
  float* centre() const { return reinterpret_cast<float*>(centre_.data()); }

 private:
  // Tables for as many pages.
  absl::Status Grow(int64_t page_count);

  const CudaModel* model_;
  BlockPools* blocks_;
  bool centred_ = false;
  int64_t coded_token_count_ = 0;
  std::vector<PageTable> codes_;  // per KV head; empty without codes
  Block centre_;                  // [H][d] floats, never changed once centred
  Block tables_;                  // [2][H][capacity]: rows, codes
  int64_t capacity_ = 0;
  // What the GPU's tables hold, or will once the updates that were handed out
  // have run: [2 H][pages].
  std::vector<std::vector<const std::byte*>> mirror_;
  // Pages below these cannot have changed since the last Update.
  int64_t synced_row_pages_ = 0;
  int64_t synced_code_pages_ = 0;
};

class CudaSequence final : public DeviceSequence {
 public:
  CudaSequence(const CudaModel& model, BlockPools* blocks);
  CudaSequence(const CudaModel& model, BlockPools* blocks, const CudaSequence& source,
               int64_t token_count);

  int64_t index_bytes() const override;
  std::vector<LayerIndex> layers;
};

}  // namespace spillway::cuda

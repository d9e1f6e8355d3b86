#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gpu/device/block.h"
#include "gpu/device/model.h"
#include "gpu/device/resident_rows.h"
#include "gpu/kernels/attend.h"
#include "host/memory/page_table.h"

namespace spillway::cuda {

// What the GPU knows of one layer of a sequence: the addresses of row and
// code pages, codes, the centre, and some of the rows.
class LayerIndex {
 public:
  LayerIndex(const CudaModel& model, BlockPools* blocks, int layer);
  // The first token_count tokens of another's, pages shared.
  LayerIndex(const CudaModel& model, BlockPools* blocks, const LayerIndex& source,
             int64_t token_count);

  bool centred() const { return centred_; }
  int64_t coded_token_count() const { return coded_token_count_; }
  // Of codes and rows in GPU memory.
  int64_t bytes() const;

  // Room for the codes, rows and addresses of tokens up to start + count; see
  // Device::PrepareAppend. RESOURCE_EXHAUSTED.
  absl::Status Prepare(int64_t start, int64_t count);
  void Truncate(int64_t token_count);

  // Adds what the GPU's tables lack of the pages of rows and codes. Room for
  // rows was prepared, or is made now. RESOURCE_EXHAUSTED.
  absl::Status Update(const LayerRows& rows, std::vector<TableUpdate>& updates);
  // Says that updates were handed out in vain.
  void ForgetTables();
  // Adds the keys that are not encoded yet.
  void AddKeys(const LayerRows& rows, const float* transposed,
               std::vector<AppendedKey>& keys) const;
  // Adds the copies of rows that the GPU is to hold, of tokens that are to be
  // encoded up to token_count.
  void FillResident(const LayerRows& rows, int64_t token_count, std::vector<RowCopy>& copies) {
    resident_.Fill(rows, coded_token_count_, token_count, copies);
  }
  // Says that tokens up to token_count are encoded, the centre known.
  void SetCoded(int64_t token_count) {
    centred_ = true;
    coded_token_count_ = token_count;
  }

  // Device addresses, valid until the next Prepare or Update.
  const std::byte* const* row_pages(int kv_head) const;
  std::byte* const* code_pages(int kv_head) const;
  ResidentRows resident(int kv_head) const {
    return resident_.View(resident_tables(), capacity_, kv_head);
  }
  int64_t page_capacity() const { return capacity_; }
  float* centre() const { return reinterpret_cast<float*>(centre_.data()); }

 private:
  // Tables for as many pages.
  absl::Status Grow(int64_t page_count);
  // Behind the pages' addresses.
  uint64_t* resident_tables() const {
    return tables_ ? reinterpret_cast<uint64_t*>(tables_.data()) +
                         static_cast<int64_t>(mirror_.size()) * capacity_
                   : nullptr;
  }

  const CudaModel* model_;
  BlockPools* blocks_;
  bool centred_ = false;
  int64_t coded_token_count_ = 0;
  std::vector<PageTable> codes_;  // per KV head; empty without codes
  Block centre_;                  // [H][d] floats, never changed once centred
  ResidentRowsOfLayer resident_;
  Block tables_;  // [2][H][capacity] addresses of pages of rows and codes, then resident_'s
  int64_t capacity_ = 0;
  // What the GPU's tables hold, or will once the updates that were handed out
  // have run: [2 H][pages].
  std::vector<std::vector<const std::byte*>> mirror_;
  // Pages below these cannot have changed since the last Update.
  int64_t synced_row_pages_ = 0;
  int64_t synced_code_pages_ = 0;
  bool tables_new_ = true;  // nothing was handed out for tables_ yet
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

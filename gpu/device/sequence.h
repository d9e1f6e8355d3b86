#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gpu/device/block.h"
#include "gpu/device/model.h"
#include "gpu/device/resident_rows.h"
#include "gpu/device/whole_rows.h"
#include "gpu/kernels/attend.h"
#include "host/device/residency.h"
#include "host/memory/page_table.h"

namespace spillway::cuda {

// What the GPU knows of one layer of a sequence: the addresses of row and
// index pages, the index, what it says of each KV head, and some of the rows.
class LayerIndex {
 public:
  LayerIndex(const CudaModel& model, BlockPools* blocks, int layer);
  // The first token_count tokens of another's, pages shared.
  LayerIndex(const CudaModel& model, BlockPools* blocks, const LayerIndex& source,
             int64_t token_count);

  // Tokens that methods have encoded and whose rows the GPU holds as far as it
  // holds any; none below kCentreTokenCount. Pages are coded once they are
  // closed.
  int64_t indexed_token_count() const { return indexed_token_count_; }
  int64_t coded_page_count() const { return ClosedPages(indexed_token_count_); }
  // Of index pages and rows in GPU memory, without those of whole().
  int64_t bytes() const;

  // Addresses of so many tokens at least stay where they are from now on.
  // RESOURCE_EXHAUSTED.
  absl::Status Reserve(int64_t token_count);
  // Room for the index, rows and addresses of tokens up to start + count; see
  // Device::PrepareAppend. make_room: for copies of all rows, which go as far as
  // there is room. RESOURCE_EXHAUSTED.
  absl::Status Prepare(int64_t start, int64_t count, WholeRowsOfLayer::MakeRoom make_room);
  void Truncate(int64_t token_count);

  // Adds what the GPU's tables lack of the pages of rows and of the index. Room
  // for rows was prepared, or is made now. RESOURCE_EXHAUSTED.
  absl::Status Update(const LayerRows& rows, std::vector<TableUpdate>& updates);
  // Says that updates were handed out in vain.
  void ForgetTables();
  // Where the rows go that the GPU is to hold, of tokens that are to be indexed up
  // to token_count.
  void FillResident(int64_t token_count, ResidentRowsOfLayer::Place place) {
    resident_.Fill(indexed_token_count_, token_count, place);
  }
  // The same as copies.
  void FillResident(const LayerRows& rows, int64_t token_count, std::vector<RowCopy>& copies) {
    FillResident(token_count, [&](int kv_head, int64_t token, std::byte* to, bool) {
      copies.push_back({rows.Row(kv_head, token), to});
    });
  }
  WholeRowsOfLayer& whole() { return whole_; }
  const WholeRowsOfLayer& whole() const { return whole_; }
  // Adds copies of the rows of tokens [begin, end) to `copies`, where those before them
  // are there; all that have room are, from then on.
  void FillWhole(const LayerRows& rows, int64_t begin, int64_t end, std::vector<RowCopy>& copies);
  // Copies of rows that are in host memory and have room, but are not here yet, of
  // tokens up to token_count; those are here from then on. Reads the tables.
  WholeCopy FillWhole(int64_t token_count);
  // Of the rows of tokens up to token_count that have no room in whole().
  int64_t MissingBytes(int64_t token_count) const;
  // The keys of tokens [begin, end) to encode.
  EncodeWork Work(int64_t begin, int64_t end) const;
  // Says that tokens up to token_count are indexed, and what is known of heads
  // is there.
  void SetIndexed(int64_t token_count) { indexed_token_count_ = token_count; }

  // Device addresses, valid until the next Prepare or Update.
  const std::byte* const* row_pages(int kv_head) const;
  // The same for who only reads rows: in GPU memory as far as whole() goes.
  const std::byte* const* read_pages(int kv_head) const;
  std::byte* const* code_pages(int kv_head) const;
  ResidentRows resident(int kv_head) const;
  int64_t page_capacity() const { return capacity_; }
  // Of a KV head, null while nothing is indexed. Statistics: with a rotation;
  // centre [d]: of methods that encode keys.
  const HeadStatistics* statistics(int kv_head) const;
  const float* centre(int kv_head) const;
  // What they are written to. REQUIRES: kCentreTokenCount tokens were prepared.
  HeadIndex heads() const;
  // [H][d]; null without methods that encode keys.
  float* centres() const;

 private:
  // Bytes of heads_.
  int64_t HeadBytes() const;
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
  int64_t indexed_token_count_ = 0;
  std::vector<PageTable> codes_;  // index pages per KV head; empty without an index
  // With a rotation HeadStatistics [H] and value centres [H][d]; then with
  // methods that encode keys centres [H][d]. Never changed while tokens are
  // indexed.
  Block heads_;
  ResidentRowsOfLayer resident_;
  WholeRowsOfLayer whole_;
  // [3][H][capacity] addresses of pages of rows, of the index, and of rows to read; then
  // resident_'s.
  Block tables_;
  int64_t capacity_ = 0;
  // What the GPU's tables hold, or will once the updates that were handed out
  // have run: [3 H][pages].
  std::vector<std::vector<const std::byte*>> mirror_;
  // Pages below these cannot have changed since the last Update.
  int64_t synced_row_pages_ = 0;
  int64_t synced_code_pages_ = 0;
  int64_t synced_read_pages_ = 0;
  bool tables_new_ = true;  // nothing was handed out for tables_ yet
};

class CudaSequence final : public DeviceSequence, public Residency::Member {
 public:
  CudaSequence(const CudaModel& model, BlockPools* blocks, Residency* residency);
  CudaSequence(const CudaModel& model, BlockPools* blocks, Residency* residency,
               const CudaSequence& source, int64_t token_count);
  ~CudaSequence() override { residency_->Remove(*this); }

  int64_t index_bytes() const override;
  // Residency::Member.
  void GiveUp() override;
  int64_t held_bytes() const override;
  // Of token_count tokens a layer, rows that have no room here get some with the next
  // PrepareAppend() once attends have read as many bytes over the link. REQUIRES: in use.
  void ResumeWhole(int64_t token_count);
  void CountMoved(int64_t bytes) { residency_->CountMoved(*this, bytes); }
  bool MakeRoom() { return residency_->MakeRoom(); }
  // In use, no one asks it to give up.
  ResidencyUse Use() { return {*residency_, *this}; }

  std::vector<LayerIndex> layers;

 private:
  Residency* const residency_;
};

}  // namespace spillway::cuda

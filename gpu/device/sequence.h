#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gpu/device/block.h"
#include "gpu/device/model.h"
#include "gpu/device/resident_rows.h"
#include "gpu/device/whole_rows.h"
#include "gpu/kernels/resident.h"
#include "host/device/residency.h"
#include "host/memory/page_table.h"
#include "host/memory/retired_pages.h"

namespace spillway::cuda {

// What the GPU knows of one layer of a sequence: the addresses of row and index pages, the index,
// statistics of each KV head, and some of the rows.
class LayerIndex {
 public:
  LayerIndex(const CudaModel& model, BlockPools* blocks, int layer);
  // Shares the pages of the first token_count tokens of `source`.
  LayerIndex(const CudaModel& model, BlockPools* blocks, const LayerIndex& source,
             int64_t token_count);

  // Pages for which tables have room that are made for page_count pages.
  static int64_t CapacityFor(int64_t page_count);
  // Bytes of tables with room for `capacity` pages.
  static int64_t TableBytes(const ModelSpec& spec, int64_t capacity);
  // Bytes of statistics and centres of the KV heads. methods_encode: CudaModel::methods_encode().
  static int64_t HeadBytes(const ModelSpec& spec, bool methods_encode);

  // Tokens that methods have encoded, and of which the GPU has the rows that it holds; 0 below
  // kCentreTokenCount. Pages are coded when they are full.
  int64_t indexed_token_count() const { return indexed_token_count_; }
  int64_t coded_page_count() const { return ClosedPages(indexed_token_count_); }
  // Bytes of index pages and rows in GPU memory, without those of whole().
  int64_t bytes() const;

  // Makes the tables large enough for token_count tokens, so that they do not move up to there.
  // RESOURCE_EXHAUSTED.
  absl::Status Reserve(int64_t token_count);
  // Makes room for index, rows and addresses of tokens up to start + count; see
  // Device::PrepareAppend(). whole() is prepared apart from it. REQUIRES: no tokens behind `start`.
  // RESOURCE_EXHAUSTED.
  absl::Status Prepare(int64_t start, int64_t count);
  void Truncate(int64_t token_count);

  // Adds the updates that the GPU's tables of row and index pages need for token_count tokens. Room
  // for the tables was prepared, or is made now. RESOURCE_EXHAUSTED.
  absl::Status Update(const LayerRows& rows, int64_t token_count,
                      std::vector<TableUpdate>& updates);
  // To be called if updates were handed out but did not run.
  void ForgetTables();
  // Calls `place` for the rows that the GPU is to hold, of tokens up to token_count that are not
  // indexed yet.
  void FillResident(int64_t token_count, ResidentRowsOfLayer::Place place) {
    resident_.Fill(indexed_token_count_, token_count, place);
  }
  // The same as a list of copies.
  void FillResident(const LayerRows& rows, int64_t token_count, std::vector<RowCopy>& copies) {
    FillResident(token_count, [&](int kv_head, int64_t token, std::byte* to, bool) {
      copies.push_back({rows.Row(kv_head, token), to});
    });
  }
  WholeRowsOfLayer& whole() { return whole_; }
  const WholeRowsOfLayer& whole() const { return whole_; }
  // Adds to `copies` the rows of tokens [begin, end) that have room in whole(), if all rows before
  // them are there. They count as filled from then on.
  void FillWhole(const LayerRows& rows, int64_t begin, int64_t end, std::vector<RowCopy>& copies);
  // The copies of rows of tokens up to token_count that have room in whole() but are not there yet.
  // They count as filled from then on. Reads the tables.
  WholeCopy FillWhole(int64_t token_count);
  // Bytes of the rows of tokens up to token_count that have no room in whole().
  int64_t MissingBytes(int64_t token_count) const;
  // The work of encoding the keys of tokens [begin, end).
  EncodeWork Work(int64_t begin, int64_t end) const;
  // Says that tokens up to token_count are indexed and heads() is filled.
  void SetIndexed(int64_t token_count) { indexed_token_count_ = token_count; }

  // Device addresses, valid until the next Prepare or Update.
  const std::byte* const* row_pages(int kv_head) const;
  // The same for readers of rows: pages in GPU memory as far as whole() goes.
  const std::byte* const* read_pages(int kv_head) const;
  std::byte* const* code_pages(int kv_head) const;
  ResidentRows resident(int kv_head) const;
  int64_t page_capacity() const { return capacity_; }
  // Of a KV head; null while nothing is indexed. Statistics: only with a rotation. Centre [d]: only
  // with methods that encode keys.
  const HeadStatistics* statistics(int kv_head) const;
  const float* centre(int kv_head) const;
  // Where statistics are written. REQUIRES: kCentreTokenCount tokens were prepared.
  HeadIndex heads() const;
  // [H][d]; null without methods that encode keys.
  float* centres() const;

 private:
  // Bytes of heads_.
  int64_t HeadBytes() const { return HeadBytes(model_->spec(), model_->methods_encode()); }
  // Makes tables for page_count pages.
  absl::Status Grow(int64_t page_count);
  // After the addresses of pages.
  uint64_t* resident_tables() const {
    return tables_ ? reinterpret_cast<uint64_t*>(tables_.data()) +
                         static_cast<int64_t>(mirror_.size()) * capacity_
                   : nullptr;
  }

  const CudaModel* model_;
  BlockPools* blocks_;
  int64_t indexed_token_count_ = 0;
  std::vector<PageTable> codes_;  // index pages per KV head; empty without an index
  // With a rotation HeadStatistics [H] and value centres [H][d]; then, with methods that encode
  // keys, centres [H][d]. Not changed while tokens are indexed.
  Block heads_;
  ResidentRowsOfLayer resident_;
  WholeRowsOfLayer whole_;
  // [3][H][capacity] addresses of pages of rows, of index pages, and of pages to read rows from;
  // then the tables of resident_.
  Block tables_;
  int64_t capacity_ = 0;
  // [3 H][pages]: what the GPU's tables hold, or will hold once the updates that were handed out
  // have run.
  std::vector<std::vector<const std::byte*>> mirror_;
  // Pages below these have not changed since the last Update().
  int64_t synced_row_pages_ = 0;
  int64_t synced_code_pages_ = 0;
  int64_t synced_read_pages_ = 0;
  bool tables_new_ = true;  // no updates were handed out for tables_ yet
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
  int64_t AheadPages(const CopyLayers& of) const override;
  // Tells how many tokens the next append has: as many as the last one, or as a step of the decoder
  // that opens.
  void ExpectAppends(int64_t count);
  // Device::PrepareAppend(). REQUIRES: in use.
  absl::Status Prepare(int layer, int64_t start, int64_t count);
  // LayerIndex::Reserve(). Copies of sequences that are not in use make room. REQUIRES: in use.
  absl::Status Reserve(int layer, int64_t token_count);
  void CountMoved(int64_t bytes) { residency_->CountMoved(*this, bytes); }
  // While the sequence is in use, nobody calls GiveUp().
  ResidencyUse Use() { return {*residency_, *this}; }

  // Pages of copies that steps of this sequence which have begun may still read.
  RetiredPages& retired() { return retired_; }

  std::vector<LayerIndex> layers;

 private:
  // With token_count tokens per layer, for one of them: once attends have read as many bytes over
  // the link as the rows without room here have, the next Prepare() makes room for them.
  void ResumeWhole(int layer, int64_t token_count);
  // Decides which layers have copies, after the first one has grown.
  void FitCopies();
  // Takes the copies from layers that are not to have any. Returns whether their pages are free.
  bool Trim();
  // Makes room for a layer's copy, at the cost of idle sequences or, if it may lower the number of
  // layers that have copies, of the last one.
  bool MakeRoom(int layer, bool may_lower);
  // Makes room for codes, at the cost of copies: of sequences that are not in use, else of this
  // one's last layers, else of all of them. Returns whether copies were given up at once.
  bool MakeRoomForCodes();
  // The same at the cost of sequences that are not in use.
  bool MakeRoomOfOthers();

  const CudaModel& model_;
  Residency* const residency_;
  int copy_count_;  // layers behind them have no copies
  RetiredPages retired_;
  // Pages of the append that may come next, of all KV heads of a layer.
  std::atomic<int64_t> append_pages_ = 0;
};

}  // namespace spillway::cuda

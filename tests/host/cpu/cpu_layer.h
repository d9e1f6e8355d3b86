#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "host/cpu/cpu_state.h"
#include "host/memory/arena.h"
#include "host/memory/layer_rows.h"
#include "host/memory/memory_budget.h"
#include "host/memory/page_pool.h"
#include "tests/reference/elements.h"
#include "tests/reference/trace.h"

namespace spillway {

// A model of one layer, and memory for its sequences.
class CpuWorld {
 public:
  explicit CpuWorld(const ModelSpec& spec) : budget_(int64_t{1} << 30) {
    ArenaOptions options;
    options.limit_bytes = int64_t{256} << 20;
    options.extent_bytes = int64_t{8} << 20;
    arena_ = Arena::Create(options, &budget_).value();
    model_ = CpuModel::Create(spec, arena_.get(), {}).value();
    row_pool_ = std::make_unique<PagePool>(arena_.get(), kPageTokenCount * spec.row_bytes());
  }

  MemoryBudget& budget() { return budget_; }
  const CpuModel& model() const { return *model_; }
  PagePool* row_pool() { return row_pool_.get(); }

 private:
  MemoryBudget budget_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<CpuModel> model_;
  std::unique_ptr<PagePool> row_pool_;
};

inline ModelSpec RotationSpec(int kv_heads, int group, int head_dim, DType dtype, int bits) {
  ModelSpec spec;
  spec.layer_count = 1;
  spec.kv_head_count = kv_heads;
  spec.query_head_count = kv_heads * group;
  spec.head_dim = head_dim;
  spec.dtype = dtype;
  spec.hash = {.kind = HashKind::kRotation, .bits_per_dim = bits, .seed = 5};
  EXPECT_TRUE(Normalize(spec).empty());
  return spec;
}

// A sequence: rows and their index.
class CpuLayer {
 public:
  explicit CpuLayer(CpuWorld& world)
      : world_(&world),
        rows_(world.row_pool(), world.model().spec()),
        sequence_(std::make_unique<CpuSequence>(world.model())) {}

  // How later appends are indexed.
  void set_loops(const JobLoops& loops) { loops_ = loops; }
  // Appends tokens [from, to) of the context, `chunk` at a time (0: at once).
  void Append(const reference::Context& context, int64_t from, int64_t to, int64_t chunk = 0) {
    const int64_t step = chunk == 0 ? to - from : chunk;
    for (int64_t start = from; start < to; start += step) {
      AppendOnce(context, start, std::min(step, to - start));
    }
  }
  void Truncate(int64_t token_count) {
    sequence_->Truncate(token_count);
    rows_.Truncate(token_count);
  }
  CpuLayer Fork(int64_t token_count) const {
    return CpuLayer(world_, rows_.Share(token_count),
                    std::make_unique<CpuSequence>(*sequence_, token_count));
  }

  const LayerRows& rows() const { return rows_; }
  const LayerIndex& index() const { return sequence_->layers[0]; }
  int64_t index_bytes() const { return sequence_->index_bytes(); }
  // The bytes of a code page.
  std::vector<std::byte> Codes(int kv_head, int64_t page) const {
    const std::byte* bytes = index().codes[kv_head].Page(page);
    return {bytes, bytes + IndexPageBytes(world_->model().spec())};
  }

 private:
  CpuLayer(CpuWorld* world, LayerRows rows, std::unique_ptr<CpuSequence> sequence)
      : world_(world), rows_(std::move(rows)), sequence_(std::move(sequence)) {}

  void AppendOnce(const reference::Context& context, int64_t start, int64_t count) {
    const ModelSpec& spec = context.spec;
    ASSERT_EQ(rows_.token_count(), start);
    const auto slice = [&](const std::vector<float>& all) {
      std::vector<float> part;
      for (int h = 0; h < spec.kv_head_count; ++h) {
        const auto head = all.begin() + (h * context.n + start) * spec.head_dim;
        part.insert(part.end(), head, head + count * spec.head_dim);
      }
      return reference::Bytes(spec.dtype, part);
    };
    const std::vector<std::byte> k = slice(context.k), v = slice(context.v);
    ASSERT_TRUE(rows_.PrepareAppend(count).ok());
    ASSERT_TRUE(sequence_->PrepareAppend(0, start, count).ok());
    const int64_t bytes = rows_.row_bytes() / 2;
    for (int h = 0; h < spec.kv_head_count; ++h) {
      rows_.WriteRows(h, start, 0, count, RowSource::Dense(k.data(), count, bytes),
                      RowSource::Dense(v.data(), count, bytes));
    }
    rows_.Commit(start + count);
    IndexAppended(world_->model(), 0, rows_, sequence_->layers[0], loops_);
  }

  CpuWorld* world_;
  JobLoops loops_;
  LayerRows rows_;
  std::unique_ptr<CpuSequence> sequence_;
};

}  // namespace spillway

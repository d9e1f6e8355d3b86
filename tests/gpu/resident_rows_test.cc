#include "gpu/device/resident_rows.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

// The rows that a GPU would hold, in an arena of host memory: to which tokens they belong, and that
// they equal these tokens' rows, whatever came before.
namespace spillway::cuda {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

ModelSpec Spec() {
  ModelSpec spec;
  spec.layer_count = 4;
  spec.query_head_count = 4;
  spec.kv_head_count = 2;
  spec.head_dim = 16;
  spec.dtype = DType::kF32;
  spec.resident_sample_fraction = kResidentSampleFractionMax;
  spec.resident_sample_seed = 9;
  Normalize(spec);
  return spec;
}

// Memory that all sequences of a test share.
struct Memory {
  Memory()
      : pool(arena.get(), kPageTokenCount * spec.row_bytes()),
        resident_pool(arena.get(), kResidentPageRows * spec.row_bytes()) {
    blocks.SetArena(arena.get());
  }
  const ModelSpec spec = Spec();
  MemoryBudget budget{512 * kMiB};
  std::unique_ptr<Arena> arena =
      Arena::Create({.limit_bytes = 256 * kMiB, .extent_bytes = 8 * kMiB}, &budget).value();
  PagePool pool;
  PagePool resident_pool;
  BlockPools blocks;
};

// The rows of a layer, the copies that are held of them, and the tables that kernels would read.
class Layer {
 public:
  static constexpr int kLayer = 3;

  explicit Layer(Memory* memory)
      : memory_(memory),
        rows_(&memory->pool, memory->spec),
        held_(memory->spec, &memory->resident_pool, &memory->blocks, kLayer) {}
  Layer(const Layer& source, int64_t token_count)
      : memory_(source.memory_),
        rows_(source.rows_.Share(token_count)),
        held_(source.held_, token_count) {}

  int64_t token_count() const { return rows_.token_count(); }

  void Append(int64_t count, std::mt19937& random) {
    const int64_t start = token_count();
    ASSERT_TRUE(rows_.PrepareAppend(count).ok());
    ASSERT_TRUE(held_.Prepare(start + count).ok());
    const int64_t size = memory_->spec.kv_head_count * count * memory_->spec.head_dim;
    std::vector<float> k(size), v(size);
    for (float& x : k) x = static_cast<float>(random());
    for (float& x : v) x = static_cast<float>(random());
    const int64_t bytes = rows_.row_bytes() / 2;
    for (int h = 0; h < memory_->spec.kv_head_count; ++h) {
      rows_.WriteRows(h, start, 0, count, RowSource::Dense(k.data(), count, bytes),
                      RowSource::Dense(v.data(), count, bytes));
    }
    rows_.Commit(start + count);
    held_.Fill(start, start + count, [&](int kv_head, int64_t token, std::byte* to, bool) {
      std::memcpy(to, rows_.Row(kv_head, token), static_cast<size_t>(memory_->spec.row_bytes()));
    });
  }
  // Prepares an append that never happens.
  void PrepareOnly(int64_t count) { ASSERT_TRUE(held_.Prepare(token_count() + count).ok()); }
  void Truncate(int64_t token_count) {
    rows_.Truncate(token_count);
    held_.Truncate(token_count);
  }

  // Brings the tables up to date, as a job does before its kernels run.
  void Sync() {
    const int64_t pages = (token_count() + 4 * kPageTokenCount) / kPageTokenCount;
    const bool anew = pages > capacity_;
    if (anew) {
      capacity_ = 2 * pages;
      tables_.assign(static_cast<size_t>(held_.TableWords(capacity_)), 0xCDCDCDCDCDCDCDCDu);
    }
    std::vector<TableUpdate> updates;
    held_.Sync(tables_.data(), capacity_, anew, updates);
    for (const TableUpdate& update : updates) *update.slot = update.value;
  }

  void Check(const std::string& what) {
    const ModelSpec& spec = memory_->spec;
    for (int h = 0; h < spec.kv_head_count; ++h) {
      const ResidentRows view = held_.View(tables_.data(), capacity_, h);
      const SampleKey key = MakeSampleKey(spec.resident_sample_seed, kLayer, h);
      uint32_t rank = 0;
      for (int64_t t = 0; t < token_count(); ++t) {
        const ResidentPage& page = view.pages[t / kPageTokenCount];
        const auto slot = static_cast<uint32_t>(t % kPageTokenCount);
        if (slot == 0) {
          ASSERT_EQ(page.before, rank) << what << " token " << t;
        }
        const bool chosen = t < kResidentSink || TokenHash(key, static_cast<uint32_t>(t)) <
                                                     spec.ResidentSample(spec.resident_sample_seed);
        ASSERT_EQ((page.mask[slot / 32] >> (slot % 32) & 1u) != 0, chosen) << what << " " << t;
        const auto row = [&](const std::byte* at) {
          return std::memcmp(at, rows_.Row(h, t), static_cast<size_t>(spec.row_bytes()));
        };
        if (chosen) {
          ASSERT_EQ(row(view.row_pages[rank / kResidentPageRows] +
                        rank % kResidentPageRows * spec.row_bytes()),
                    0)
              << what << " token " << t;
          ++rank;
        }
        if (t >= view.recent_begin) {
          ASSERT_EQ(row(view.recent + t % kRecentRows * spec.row_bytes()), 0)
              << what << " newest " << t;
        }
      }
      EXPECT_EQ(view.sink, std::min<int64_t>(kResidentSink, token_count())) << what;
    }
  }
  int64_t recent_begin() const {
    return held_.View(const_cast<uint64_t*>(tables_.data()), capacity_, 0).recent_begin;
  }
  int64_t held_bytes() const { return held_.bytes(); }

 private:
  Memory* memory_;
  LayerRows rows_;
  ResidentRowsOfLayer held_;
  std::vector<uint64_t> tables_;
  int64_t capacity_ = 0;
};

TEST(ResidentRows, AreTheRowsAfterAnySequenceOfSteps) {
  Memory memory;
  std::mt19937 random(5);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::unique_ptr<Layer>> layers;
    layers.push_back(std::make_unique<Layer>(&memory));
    for (int step = 0; step < 40; ++step) {
      const size_t at = random() % layers.size();
      Layer& layer = *layers[at];
      const std::string what = "round " + std::to_string(round) + " step " + std::to_string(step);
      switch (random() % 6) {
        case 0:
          layer.Truncate(static_cast<int64_t>(random() % (layer.token_count() + 1)));
          break;
        case 1:
          if (layers.size() < 4 && layer.token_count() > 0) {
            const auto count = static_cast<int64_t>(random() % layer.token_count());
            layers.push_back(std::make_unique<Layer>(layer, count));
            layers.back()->Sync();
            if (count > 0) layers.back()->Check(what + " fork");
          }
          break;
        case 2:
          // An append that was refused elsewhere; the next append starts over.
          layer.PrepareOnly(static_cast<int64_t>(random() % 500));
          layer.Truncate(layer.token_count());
          break;
        default: {
          constexpr int64_t kMost[] = {1, 3, 130, 900};
          layer.Append(1 + static_cast<int64_t>(random() % kMost[random() % 4]), random);
        }
      }
      for (const auto& each : layers) {
        each->Sync();
        if (each->token_count() > 0) each->Check(what);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
  EXPECT_EQ(memory.resident_pool.used_page_count(), 0);
}

TEST(ResidentRows, HoldTheNewestTokensOfADecodingSequence) {
  Memory memory;
  std::mt19937 random(6);
  Layer layer(&memory);
  layer.Append(3000, random);
  layer.Sync();
  EXPECT_EQ(layer.recent_begin(), 3000 - kRecentRows);
  for (int i = 0; i < 200; ++i) layer.Append(1, random);
  layer.Sync();
  EXPECT_EQ(layer.recent_begin(), 3200 - kRecentRows);
  layer.Truncate(3190);
  layer.Sync();
  // The dropped tokens had overwritten older ones, which are gone.
  EXPECT_EQ(layer.recent_begin(), 3200 - kRecentRows);
  layer.Check("after a cut");
  layer.Truncate(1000);
  layer.Append(5, random);
  layer.Sync();
  EXPECT_EQ(layer.recent_begin(), 1000);
  layer.Check("after a deep cut");
  layer.Truncate(0);
  EXPECT_EQ(layer.held_bytes(), 0);
}

TEST(ResidentRows, PagesOfAForkAreItsOwnFromTheFirstTokenOn) {
  Memory memory;
  std::mt19937 random(5);
  Layer source(&memory);
  source.Append(1000, random);
  Layer fork(source, 1000);
  const int64_t shared = memory.resident_pool.used_page_count();
  // The last page of both heads has room. Token 1,000 is not in the sample.
  fork.PrepareOnly(1);
  EXPECT_EQ(memory.resident_pool.used_page_count(), shared + 2);
  fork.Append(200, random);
  const int64_t own = memory.resident_pool.used_page_count();
  source.Append(200, random);
  fork.Sync();
  fork.Check("fork");
  source.Sync();
  source.Check("source");
  EXPECT_GE(own, shared + 2);
}

TEST(ResidentRows, WithoutRoomNothingChanges) {
  Memory memory;
  std::mt19937 random(7);
  Layer layer(&memory);
  layer.Append(500, random);
  layer.Sync();
  // Takes all of the arena that is not held.
  std::vector<PageRef> taken;
  for (;;) {
    const auto page = memory.resident_pool.Allocate();
    if (!page.ok()) break;
    taken.push_back(*page);
  }
  ResidentRowsOfLayer fresh(memory.spec, &memory.resident_pool, &memory.blocks, 0);
  EXPECT_EQ(fresh.Prepare(5000).code(), absl::StatusCode::kResourceExhausted);
  for (const PageRef page : taken) memory.resident_pool.Release(page);
  EXPECT_TRUE(fresh.Prepare(5000).ok());
  layer.Check("beside one that found no room");
}

}  // namespace
}  // namespace spillway::cuda

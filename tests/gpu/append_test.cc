// The page index that appending jobs leave, whatever came before them.
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gpu/cuda/device_backing.h"
#include "gpu/device/append_pipeline.h"
#include "host/codes/rotation.h"
#include "tests/gpu/expect_page.h"
#include "tests/gpu/pin_extents.h"

namespace spillway::cuda {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int kLayer = 1;

ModelSpec Spec(DType dtype) {
  ModelSpec spec;
  spec.layer_count = kLayer + 1;
  spec.query_head_count = 4;
  spec.kv_head_count = 2;
  spec.head_dim = 48;
  spec.dtype = dtype;
  spec.hash = {.kind = HashKind::kRotation, .bits_per_dim = 2, .seed = 5};
  Normalize(spec);
  return spec;
}

// The memory of a GPU, with a model and a stream.
class Gpu0 {
 public:
  explicit Gpu0(const ModelSpec& model_spec) : spec(model_spec) {
    host_ = Arena::Create({.limit_bytes = 256 * kMiB}, &host_budget_, PinExtents()).value();
    device_ = Arena::Create({.limit_bytes = 256 * kMiB, .extent_bytes = 32 * kMiB}, &device_budget_,
                            CreateDeviceBacking(0, 256 * kMiB).value())
                  .value();
    copies_ = std::make_unique<SlabLimit>(device_.get(), 64 * kMiB, /*spare_bytes=*/0);
    blocks.SetArena(device_.get());
    model = CudaModel::Create(spec, device_.get(), copies_.get(), &device_budget_,
                              CreateModelMethods(spec, {}).value())
                .value();
    slot = StreamSlot::Create(&device_budget_, &host_budget_, 64 * kMiB, /*urgent=*/false).value();
    row_pool = std::make_unique<PagePool>(host_.get(), kPageTokenCount * spec.row_bytes());
  }

  // Runs a job that only appends.
  void Run(Job& job) {
    job.model = model.get();
    job.layer = kLayer;
    JobContext context(&job, slot.get(), {.sm_count = 1, .name = "cuda:0"});
    AppendPipeline pipeline(&context);
    const absl::Status status = pipeline.Enqueue(/*step_later=*/false, /*stage=*/nullptr);
    ASSERT_TRUE(status.ok()) << status;
    Check(cudaStreamSynchronize(slot->stream()));
  }

  const ModelSpec spec;

 private:
  MemoryBudget host_budget_{512 * kMiB};
  MemoryBudget device_budget_{512 * kMiB};
  std::unique_ptr<Arena> host_;
  std::unique_ptr<Arena> device_;
  std::unique_ptr<SlabLimit> copies_;

 public:
  Residency residency;
  BlockPools blocks;
  std::unique_ptr<CudaModel> model;
  std::unique_ptr<StreamSlot> slot;
  std::unique_ptr<PagePool> row_pool;
};

// A sequence, with checks of its layer kLayer.
class Sequence {
 public:
  explicit Sequence(Gpu0* gpu)
      : gpu_(gpu),
        rows_(gpu->row_pool.get(), gpu->spec),
        on_gpu_(*gpu->model, &gpu->blocks, &gpu->residency) {}
  Sequence(const Sequence& source, int64_t token_count)
      : gpu_(source.gpu_),
        rows_(source.rows_.Share(token_count)),
        on_gpu_(*gpu_->model, &gpu_->blocks, &gpu_->residency, source.on_gpu_, token_count) {}

  int64_t token_count() const { return rows_.token_count(); }
  const LayerIndex& index() const { return on_gpu_.layers[kLayer]; }
  WholeRowsOfLayer& whole() { return on_gpu_.layers[kLayer].whole(); }

  // Makes the item of a job that appends the next `count` tokens.
  JobItem Next(int64_t count, std::mt19937& random) {
    const ModelSpec& spec = gpu_->spec;
    const int64_t start = token_count();
    EXPECT_TRUE(rows_.PrepareAppend(count).ok());
    LayerIndex& layer = on_gpu_.layers[kLayer];
    layer.Truncate(start);
    layer.whole().Prepare(start, start + count, [] { return false; });
    EXPECT_TRUE(layer.Prepare(start, count).ok());
    for (std::vector<std::byte>* side : {&k_, &v_}) {
      const std::vector<float> x = Normals(spec.kv_head_count * count * spec.head_dim, 1, random);
      side->resize(x.size() * DTypeBytes(spec.dtype));
      FromFloat(spec.dtype, x.data(), static_cast<int64_t>(x.size()), side->data());
    }
    JobItem item;
    item.sequence = &on_gpu_;
    item.append = AppendWork::Dense(&rows_, start, count, k_.data(), v_.data());
    return item;
  }
  void Append(int64_t count, std::mt19937& random) {
    Job job;
    job.items.push_back(Next(count, random));
    gpu_->Run(job);
  }
  void Truncate(int64_t token_count) {
    rows_.Truncate(token_count);
    for (LayerIndex& layer : on_gpu_.layers) layer.Truncate(token_count);
  }

  const std::byte* HostPage(int head, int64_t page) const { return rows_.Page(head, page); }

  // The code pages of a KV head's closed pages.
  std::vector<std::vector<std::byte>> FetchPages(int head) const {
    const auto count = static_cast<size_t>(index().coded_page_count());
    std::vector<std::byte*> addresses(count);
    std::vector<std::vector<std::byte>> pages(
        count, std::vector<std::byte>(gpu_->model->tiling().page_bytes()));
    Check(cudaMemcpy(addresses.data(), index().code_pages(head), count * sizeof(addresses[0]),
                     cudaMemcpyDefault));
    for (size_t p = 0; p < count; ++p) {
      Check(cudaMemcpy(pages[p].data(), addresses[p], pages[p].size(), cudaMemcpyDefault));
    }
    return pages;
  }

  // Expects the rows of the first token_count tokens in GPU memory, where readers look for them.
  void ExpectWhole(int64_t token_count) const {
    const ModelSpec& spec = gpu_->spec;
    ASSERT_EQ(index().whole().end(),
              (token_count + kPageTokenCount - 1) / kPageTokenCount * kPageTokenCount);
    const int64_t page_count = index().whole().page_count();
    const int64_t bytes = kPageTokenCount * spec.row_bytes();
    std::vector<std::byte> page(bytes);
    std::vector<std::byte*> addresses(page_count);
    for (int h = 0; h < spec.kv_head_count; ++h) {
      Check(cudaMemcpy(addresses.data(), index().read_pages(h), page_count * sizeof(addresses[0]),
                       cudaMemcpyDefault));
      for (int64_t p = 0; p < page_count; ++p) {
        ASSERT_EQ(addresses[p], index().whole().Page(h, p)) << "head " << h << " page " << p;
        Check(cudaMemcpy(page.data(), addresses[p], bytes, cudaMemcpyDefault));
        const int64_t rows = std::min<int64_t>(kPageTokenCount, token_count - p * kPageTokenCount);
        ASSERT_EQ(std::memcmp(page.data(), rows_.Page(h, p), rows * spec.row_bytes()), 0)
            << "head " << h << " page " << p;
      }
    }
  }

  void ExpectIndex(const std::string& what) const {
    SCOPED_TRACE(what + ", " + std::to_string(token_count()) + " tokens");
    // A fork has no tables before its first job.
    if (index().page_capacity() > 0) ExpectWhole(token_count());
    const ModelSpec& spec = gpu_->spec;
    const bool long_enough = token_count() >= kCentreTokenCount;
    ASSERT_EQ(index().coded_page_count(), long_enough ? ClosedPages(token_count()) : 0);
    const std::vector<float> rotation = MakeRotation(spec.head_dim, spec.hash.seed, kLayer);
    for (int h = 0; h < spec.kv_head_count; ++h) {
      ASSERT_EQ(index().statistics(h) != nullptr, long_enough);
      if (!long_enough) continue;
      reference::Vectors keys, values;
      for (int64_t t = 0; t < token_count(); ++t) {
        std::vector<float> row(2 * spec.head_dim);
        ToFloat(spec.dtype, rows_.Row(h, t), 2 * spec.head_dim, row.data());
        keys.emplace_back(row.begin(), row.begin() + spec.head_dim);
        values.emplace_back(row.begin() + spec.head_dim, row.end());
      }
      const reference::Head wanted = reference::IndexOf(keys, values, spec.hash.raw_keys);
      HeadStatistics statistics;
      Check(cudaMemcpy(&statistics, index().statistics(h), sizeof(statistics), cudaMemcpyDefault));
      ExpectStatistics(statistics, wanted.first.statistics);
      std::vector<std::vector<std::byte>> pages = FetchPages(h);
      for (size_t p = 0; p < pages.size(); ++p) {
        SCOPED_TRACE("head " + std::to_string(h) + " page " + std::to_string(p));
        const auto first = keys.begin() + static_cast<int64_t>(p) * kPageTokenCount;
        ExpectPage(gpu_->model->tiling(), pages[p], wanted.pages[p],
                   {first, first + kPageTokenCount}, rotation);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }

 private:
  Gpu0* gpu_;
  LayerRows rows_;
  CudaSequence on_gpu_;
  std::vector<std::byte> k_, v_;
};

class GpuAppend : public ::testing::Test {
 protected:
  void SetUp() override { SKIP_WITHOUT_GPU(); }
  std::mt19937 random_{31};
};

TEST_F(GpuAppend, CodesPagesAsTheyClose) {
  Gpu0 gpu(Spec(DType::kBF16));
  Sequence sequence(&gpu);
  for (const int64_t count : {1000, 23, 1, 1, 126, 1, 1}) {
    sequence.Append(count, random_);
    sequence.ExpectIndex("growing");
  }
  // Pages close within steps, at the end of steps, and in a long append.
  while (sequence.token_count() < 1300) sequence.Append(7, random_);
  sequence.ExpectIndex("steps of 7");
  while (sequence.token_count() < 1500) sequence.Append(16, random_);
  sequence.ExpectIndex("steps of 16");
  sequence.Append(700, random_);
  sequence.ExpectIndex("a long append");
}

TEST_F(GpuAppend, TruncationOpensPagesAgain) {
  Gpu0 gpu(Spec(DType::kF32));
  Sequence sequence(&gpu);
  sequence.Append(1500, random_);
  std::array<std::vector<std::vector<std::byte>>, 2> before;
  for (int h = 0; h < 2; ++h) before[h] = sequence.FetchPages(h);
  sequence.Truncate(1200);
  sequence.ExpectIndex("truncated");
  for (int i = 0; i < 100; ++i) sequence.Append(1, random_);
  sequence.ExpectIndex("other tokens");
  for (int h = 0; h < 2; ++h) {
    const std::vector<std::vector<std::byte>> after = sequence.FetchPages(h);
    for (size_t p = 0; p < after.size(); ++p) {
      EXPECT_EQ(after[p] == before[h][p], p < 9) << "head " << h << " page " << p;
    }
  }
  sequence.Truncate(1024);
  sequence.ExpectIndex("truncated to the first pages");
  sequence.Truncate(1023);
  sequence.ExpectIndex("too short");
  sequence.Append(2, random_);
  sequence.ExpectIndex("another last token of the first");
  sequence.Truncate(300);
  sequence.Append(1100, random_);
  sequence.ExpectIndex("other first tokens");
}

TEST_F(GpuAppend, RowsThatGaveTheirRoomUpComeBack) {
  Gpu0 gpu(Spec(DType::kBF16));
  Sequence sequence(&gpu);
  sequence.Append(1500, random_);
  sequence.ExpectWhole(1500);
  sequence.whole().GiveUp();
  sequence.Append(1, random_);
  sequence.ExpectWhole(0);
  std::vector<std::byte*> first(1);
  Check(cudaMemcpy(first.data(), sequence.index().read_pages(0), sizeof(first[0]),
                   cudaMemcpyDefault));
  EXPECT_EQ(first[0], sequence.HostPage(0, 0));
  sequence.whole().Resume();
  sequence.Append(1, random_);
  sequence.ExpectIndex("copied by a step");
  sequence.whole().GiveUp();
  sequence.whole().Resume();
  sequence.Append(300, random_);
  sequence.ExpectIndex("copied by a long append");
}

TEST_F(GpuAppend, ForksShareWhatTheyHave) {
  Gpu0 gpu(Spec(DType::kF16));
  Sequence one(&gpu);
  one.Append(1400, random_);
  Sequence two(one, 1230), three(one, 1000);
  three.ExpectIndex("a short fork");
  EXPECT_EQ(two.index().statistics(0), one.index().statistics(0));
  // The next job of a fork makes its tables.
  two.Append(1, random_);
  two.ExpectIndex("a fork");
  for (int i = 0; i < 30; ++i) {
    two.Append(3, random_);
    one.Append(1, random_);
  }
  three.Append(500, random_);
  one.ExpectIndex("the source");
  two.ExpectIndex("the fork after steps");
  three.ExpectIndex("the short fork after an append");
}

TEST_F(GpuAppend, OneJobOfSeveralSequences) {
  Gpu0 gpu(Spec(DType::kBF16));
  std::vector<std::unique_ptr<Sequence>> sequences;
  for (const int64_t count : {1151, 1278, 1020, 10, 2000}) {
    sequences.push_back(std::make_unique<Sequence>(&gpu));
    sequences.back()->Append(count, random_);
  }
  // Steps that close a page and steps that do not; among the first pages and later.
  constexpr int64_t kCounts[] = {1, 1, 5, 16, 40};
  for (int round = 0; round < 3; ++round) {
    Job job;
    for (size_t i = 0; i < sequences.size(); ++i) {
      job.items.push_back(sequences[i]->Next(kCounts[i], random_));
    }
    gpu.Run(job);
    for (const auto& sequence : sequences) sequence->ExpectIndex("round " + std::to_string(round));
  }
}

}  // namespace
}  // namespace spillway::cuda

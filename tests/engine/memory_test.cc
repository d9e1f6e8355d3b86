// All memory of models and sequences is charged to the memory budget, and what is free in it can be
// appended. The tests use the CPU device, whose codes are in the same memory as the rows.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "gtest/gtest.h"
#include "host/cpu/cpu_device.h"
#include "tests/host/methods/weights/safetensors_file.h"

namespace spillway {
namespace {

constexpr int kLayers = 2, kKvHeads = 2, kD = 64;
constexpr int64_t kFloatBytes = 4;

ModelSpec Spec(const HashSpec& hash, const KeyIndexSpec& indices = {}) {
  ModelSpec spec;
  spec.layer_count = kLayers;
  spec.query_head_count = kKvHeads;
  spec.kv_head_count = kKvHeads;
  spec.head_dim = kD;
  spec.dtype = DType::kF16;
  spec.hash = hash;
  spec.indices = indices;
  EXPECT_TRUE(Normalize(spec).empty());
  return spec;
}

class Memory {
 public:
  explicit Memory(int64_t limit_bytes) : budget(limit_bytes) {
    ArenaOptions options;
    options.limit_bytes = limit_bytes;
    options.extent_bytes = kSlabBytes;
    options.touch_thread_count = 1;
    arena = *Arena::Create(options, &budget);
    device = CreateCpuDevice({.thread_count = 1}, arena.get(), &budget);
    engine.emplace(device.get(), arena.get(), &budget, EngineOptions());
  }

  std::shared_ptr<Model> NewModel(const ModelSpec& spec) {
    return *engine->CreateModel("m", spec, DefaultPolicy(spec));
  }
  std::shared_ptr<Sequence> NewSequence(const std::string& id,
                                        const std::shared_ptr<Model>& model) {
    return *engine->CreateSequence(id, model, model->policy, absl::InfiniteDuration());
  }
  // An append of this size (some MiB) is served before the call returns.
  absl::Status Append(const std::shared_ptr<Sequence>& sequence, int64_t count) {
    // Keys in different directions; all elements are finite.
    std::vector<uint16_t> rows(kLayers * kKvHeads * count * kD);
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i] = static_cast<uint16_t>(0x3000 + i * 2654435761u % 4096);
    }
    const auto source = ChunkSource::Dense(rows.data(), kKvHeads, count, 2 * kD);
    const Chunk chunk{0, kLayers, sequence->snapshot().token_count, count, 0, source, source};
    absl::Status status = absl::UnknownError("not served yet");
    engine->Append({sequence, chunk, nullptr}, [&](const absl::StatusOr<AppendOutcome>& outcome) {
      status = outcome.status();
    });
    return status;
  }
  absl::StatusOr<std::shared_ptr<Sequence>> Fork(const std::shared_ptr<Sequence>& source,
                                                 const std::string& id) {
    absl::StatusOr<std::shared_ptr<Sequence>> result;
    engine->Fork(source, id,
                 [&](absl::StatusOr<std::shared_ptr<Sequence>> fork) { result = std::move(fork); });
    return result;
  }
  void Delete(const std::string& id) {
    engine->Delete(id, [](const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; });
  }
  // Bytes charged for anything except the pages of rows and codes.
  int64_t other_bytes() const { return budget.used_bytes() - arena->statistics().committed_bytes; }

  MemoryBudget budget;
  std::unique_ptr<Arena> arena;
  std::unique_ptr<Device> device;
  std::optional<Engine> engine;
};

class TablesMemory : public ::testing::Test {
 protected:
  static constexpr int64_t kTokens = 128 * 150;
  // Pages of rows and of codes. A table has a reference of 8 bytes to each page.
  static constexpr int64_t kPages = 2 * kLayers * kKvHeads * kTokens / kPageTokenCount;
  static constexpr int64_t kReferenceBytes = 8;
  // Two page tables and one centre per KV head.
  static constexpr int64_t kEmptyBytes =
      sizeof(Sequence) + kLayers * kKvHeads * (2 * sizeof(PageTable) + kD * kFloatBytes);

  TablesMemory() : memory_(int64_t{64} << 20), model_(memory_.NewModel(Spec({}))) {}

  Memory memory_;
  std::shared_ptr<Model> model_;
};

TEST_F(TablesMemory, OfPagesIsCharged) {
  const int64_t before = memory_.other_bytes();
  const auto sequence = memory_.NewSequence("s", model_);
  const int64_t empty = memory_.other_bytes();
  EXPECT_GE(empty - before, kEmptyBytes);
  ASSERT_TRUE(memory_.Append(sequence, kTokens).ok());
  EXPECT_GE(memory_.other_bytes() - empty, kPages * kReferenceBytes);
  memory_.Delete("s");
  EXPECT_EQ(memory_.other_bytes(), before);
}

// A fork shares the pages, but has its own tables.
TEST_F(TablesMemory, OfForksIsCharged) {
  const auto sequence = memory_.NewSequence("s", model_);
  ASSERT_TRUE(memory_.Append(sequence, kTokens).ok());
  const int64_t pages = memory_.arena->statistics().used_bytes;
  const int64_t before = memory_.other_bytes();
  for (int i = 1; i <= 3; ++i) {
    ASSERT_TRUE(memory_.Fork(sequence, "f" + std::to_string(i)).ok());
    EXPECT_GE(memory_.other_bytes() - before, i * (kEmptyBytes + kPages * kReferenceBytes));
  }
  EXPECT_EQ(memory_.arena->statistics().used_bytes, pages);
  for (int i = 1; i <= 3; ++i) memory_.Delete("f" + std::to_string(i));
  EXPECT_EQ(memory_.other_bytes(), before);
}

TEST_F(TablesMemory, IsRefusedWhereItDoesNotFit) {
  const auto sequence = memory_.NewSequence("s", model_);
  ASSERT_TRUE(memory_.Append(sequence, kTokens).ok());
  const absl::StatusOr<MemoryReservation> rest =
      memory_.budget.Reserve(memory_.budget.free_bytes() - 100, "a test");
  ASSERT_TRUE(rest.ok());
  EXPECT_TRUE(absl::IsResourceExhausted(memory_.Fork(sequence, "f").status()));
  EXPECT_TRUE(absl::IsNotFound(memory_.engine->registry().FindSequence("f").status()));
  EXPECT_TRUE(absl::IsResourceExhausted(
      memory_.engine->CreateSequence("g", model_, model_->policy, absl::InfiniteDuration())
          .status()));
  EXPECT_EQ(memory_.budget.free_bytes(), 100);
}

// A kind of weights: its bytes in fp32, and the file if the client uploads it.
struct Weights {
  std::string name;
  ModelSpec spec;
  int64_t bytes;
  std::vector<std::byte> file;
};

std::vector<Weights> AllWeights() {
  constexpr int64_t kHidden = 48, kBits = 96, kTables = 40, kTableBits = 6, kChannels = 16;
  std::vector<Weights> all;
  all.push_back(
      {"rotation", Spec({.kind = HashKind::kRotation}), kLayers * kD * kD * kFloatBytes, {}});
  if (!HasMethodOf("hash_weights.mlp")) return all;  // the others are of optional methods
  all.push_back(
      {"projections",
       Spec({.kind = HashKind::kRotation}, {.lsh_table_count = kTables, .lsh_bits = kTableBits}),
       kLayers * (kD * kD + kD * kTables * kTableBits) * kFloatBytes,
       {}});
  SafeTensorsWriter mlps, channels;
  for (int l = 0; l < kLayers; ++l) {
    const std::string layer = "layers." + std::to_string(l);
    const auto add = [&](const std::string& name, const std::vector<int64_t>& shape) {
      int64_t count = 1;
      for (const int64_t n : shape) count *= n;
      mlps.Add(layer + name, shape, std::vector<float>(count, 0.5f));
    };
    for (const std::string prefix : {".", ".query_"}) {
      add(prefix + "w1", {kKvHeads, kD, kHidden});
      add(prefix + "b1", {kKvHeads, kHidden});
      add(prefix + "w2", {kKvHeads, kHidden, kHidden});
      add(prefix + "b2", {kKvHeads, kHidden});
      add(prefix + "w3", {kKvHeads, kHidden, kBits});
      add(prefix + "b3", {kKvHeads, kBits});
    }
    std::vector<int32_t> chosen(kKvHeads * kChannels);
    for (size_t i = 0; i < chosen.size(); ++i) chosen[i] = static_cast<int32_t>(i % kChannels);
    channels.AddIntegers(layer + ".channels", {kKvHeads, kChannels}, chosen);
  }
  const int64_t mlp = (kD + 1) * kHidden + (kHidden + 1) * kHidden + (kHidden + 1) * kBits;
  all.push_back({"MLPs",
                 Spec({.kind = HashKind::kMlp,
                       .hash_bits = kBits,
                       .hidden_dim = kHidden,
                       .hidden_layer_count = 2,
                       .query_weights = true}),
                 kLayers * 2 * kKvHeads * mlp * kFloatBytes, mlps.File()});
  all.push_back({"channels", Spec({.kind = HashKind::kNone}, {.label_channel_count = kChannels}),
                 kLayers * kKvHeads * kChannels * 2, channels.File()});
  return all;
}

TEST(WeightsMemory, IsCharged) {
  for (const Weights& weights : AllWeights()) {
    Memory memory(int64_t{64} << 20);
    const int64_t before = memory.other_bytes();
    {
      const std::shared_ptr<Model> model = memory.NewModel(weights.spec);
      if (weights.spec.has_weights()) {
        // The tables of a model that waits for its weights are charged, since there may be many
        // such models.
        EXPECT_GE(memory.other_bytes() - before, 4096) << weights.name << " before the upload";
        EXPECT_LE(memory.other_bytes() - before, 16384) << weights.name << " before the upload";
        ASSERT_TRUE(memory.engine->UploadWeights(*model, weights.file).ok()) << weights.name;
      }
      ASSERT_TRUE(model->ready());
      EXPECT_GE(memory.other_bytes() - before, weights.bytes) << weights.name;
      EXPECT_GE(memory.other_bytes() - before, model->device()->bytes()) << weights.name;
      ASSERT_TRUE(memory.engine->registry().RemoveModel("m").ok());
    }
    EXPECT_EQ(memory.other_bytes(), before) << weights.name;
  }
}

TEST(WeightsMemory, IsRefusedWhereItDoesNotFit) {
  for (const Weights& weights : AllWeights()) {
    Memory memory(int64_t{64} << 20);
    std::optional<absl::StatusOr<MemoryReservation>> rest;
    const auto leave = [&](int64_t bytes) {
      rest.reset();
      rest = memory.budget.Reserve(memory.budget.free_bytes() - bytes, "a test");
      EXPECT_TRUE(rest->ok());
    };
    const int64_t left_bytes = weights.bytes - 1;
    std::shared_ptr<Model> model;
    absl::Status status;
    if (weights.spec.has_weights()) {
      model = memory.NewModel(weights.spec);
      leave(left_bytes);
      status = memory.engine->UploadWeights(*model, weights.file);
      EXPECT_FALSE(model->ready());
    } else {
      leave(left_bytes);
      status = memory.engine->CreateModel("m", weights.spec, DefaultPolicy(weights.spec)).status();
    }
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << weights.name << status;
    EXPECT_EQ(memory.budget.free_bytes(), left_bytes);
  }
}

// The codes count too. With the other indices they take about as much memory as the rows.
TEST(FreeTokens, AreThoseThatCanBeAppended) {
  Memory memory(int64_t{48} << 20);
  KeyIndexSpec indices;  // the largest that this build has
  if (HasMethodOf("key_indices.int4_keys")) {
    indices = {.int4_keys = true, .lsh_table_count = 75, .lsh_bits = 8};
  }
  const std::shared_ptr<Model> model =
      memory.NewModel(Spec({.kind = HashKind::kRotation, .bits_per_dim = 4}, indices));
  const auto sequence = memory.NewSequence("s", model);
  std::vector<int64_t> told = {memory.engine->FreeTokenCount(*model)};  // also after each chunk
  constexpr int64_t kChunk = 512;
  while (memory.Append(sequence, kChunk).ok()) {
    told.push_back(memory.engine->FreeTokenCount(*model));
  }
  const SequenceSnapshot full = sequence->snapshot();
  ASSERT_GT(full.token_count, 10 * kChunk);
  ASSERT_GT(full.index_bytes, full.row_bytes / (indices.any() ? 2 : 8));
  // A slab belongs to either rows or codes, and tables grow in steps of 64 KiB.
  const int64_t each = (full.row_bytes + full.index_bytes) / full.token_count;
  const int64_t slack = kChunk + (2 * kSlabBytes + (64 << 10)) / each;
  for (size_t i = 0; i < told.size(); ++i) {
    const int64_t appended = static_cast<int64_t>(i) * kChunk;
    EXPECT_NEAR(static_cast<double>(told[i]), static_cast<double>(full.token_count - appended),
                static_cast<double>(slack))
        << "after " << appended;
  }
}

}  // namespace
}  // namespace spillway

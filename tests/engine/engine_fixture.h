#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "gtest/gtest.h"
#include "tests/engine/toy_device.h"

namespace spillway {

// An engine on a toy device: a model of 2 layers, 1 KV head, 16 dimensions, f32, without codes. In
// a chunk made by Rows(tag), all elements of row t are tag + t.
class EngineTest : public ::testing::Test {
 protected:
  explicit EngineTest(bool delayed = false, int64_t limit_bytes = int64_t{64} << 20)
      : budget(limit_bytes), device(delayed) {
    ArenaOptions options;
    options.limit_bytes = limit_bytes;
    options.extent_bytes = kSlabBytes;
    options.touch_thread_count = 1;
    arena = *Arena::Create(options, &budget);
    EngineOptions engine_options;
    engine_options.clock = [this] { return now; };
    engine_options.unnamed_grace = absl::Seconds(60);
    engine.emplace(&device, arena.get(), &budget, std::move(engine_options));
    ModelSpec spec;
    spec.layer_count = 2;
    spec.query_head_count = 1;
    spec.kv_head_count = 1;
    spec.head_dim = 16;
    spec.dtype = DType::kF32;
    spec.hash.kind = HashKind::kNone;
    EXPECT_TRUE(Normalize(spec).empty());
    model = *engine->CreateModel("m", spec, DefaultPolicy(spec));
  }

  // A test that fails may return while the device has work, and the engine waits for all of it.
  void TearDown() override {
    *over_ = true;
    device.RefuseAll();
  }

  std::shared_ptr<Sequence> NewSequence(const std::string& id,
                                        absl::Duration ttl = absl::InfiniteDuration()) {
    return *engine->CreateSequence(id, model, model->policy, ttl);
  }

  // K (or V) of `count` tokens in `layers` layers.
  static std::vector<float> Rows(float tag, int64_t count, int layers = 1) {
    std::vector<float> rows;
    for (int l = 0; l < layers; ++l) {
      for (int64_t t = 0; t < count; ++t) rows.insert(rows.end(), 16, tag + static_cast<float>(t));
    }
    return rows;
  }
  static Chunk ChunkOf(const std::vector<float>& rows, int64_t start, int64_t count,
                       int layer_start = 0, int layer_count = 1, int64_t generation = 0) {
    const auto source = ChunkSource::Dense(rows.data(), 1, count, 16 * sizeof(float));
    return {layer_start, layer_count, start, count, generation, source, source};
  }
  AttendItem Item(std::shared_ptr<Sequence> sequence) {
    AttendItem item;
    item.sequence = std::move(sequence);
    item.attend.policy = model->policy;
    item.attend.q = reinterpret_cast<const std::byte*>(query.data());
    item.attend.query_count = 1;
    return item;
  }
  // A completion that stores the result in *result, unless the test is over.
  template <typename T>
  Engine::Done<T> Into(std::optional<absl::StatusOr<T>>* result) const {
    return [result, over = over_](absl::StatusOr<T> value) {
      if (!*over) result->emplace(std::move(value));
    };
  }
  // Appends to both layers and waits.
  absl::Status Fill(const std::shared_ptr<Sequence>& sequence, const std::vector<float>& rows,
                    int64_t start, int64_t count, int64_t generation = 0) {
    std::optional<absl::StatusOr<AppendOutcome>> result;
    engine->Append({sequence, ChunkOf(rows, start, count, 0, 2, generation), nullptr},
                   Into(&result));
    device.ReleaseAll();
    return result->status();
  }

  SteadyTime now = SteadyTime(std::chrono::hours(300));
  MemoryBudget budget;
  std::unique_ptr<Arena> arena;
  ToyDevice device;
  std::optional<Engine> engine;
  std::shared_ptr<Model> model;
  std::vector<float> query = std::vector<float>(16, 1.0f);

 private:
  const std::shared_ptr<std::atomic<bool>> over_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace spillway

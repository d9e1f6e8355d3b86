// Decoders through a doorbell, on a toy device whose memory the host can read.
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "engine/attend_sums.h"
#include "engine/errors.h"
#include "gmock/gmock.h"
#include "google/rpc/status.pb.h"
#include "services/doorbell/doorbell_memory.h"
#include "services/doorbell/doorbell_server.h"
#include "spillway/v1/attention_service.pb.h"
#include "tests/engine/engine_fixture.h"
#include "tests/engine/shared_toy.h"

namespace spillway {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kDim = 16;
constexpr uint32_t kF32 = v1::DTYPE_F32;

// A step that answers each layer with q + 10 k + 100 v, and fails if q is negative. It first
// overwrites the inputs in the shared memory, as a client could. It says that it touched 2 rows at
// layer 0, and 3 at layer 1.
class AddingStep final : public StreamStep {
 public:
  AddingStep(StreamStepOptions options, const std::byte** shared)
      : options_(std::move(options)), shared_(shared) {
    for (size_t layer = 0; layer < jobs_.size(); ++layer) {
      for (const StreamStepPart& part : options_.parts) {
        JobItem& item = jobs_[layer].items.emplace_back();
        item.sequence = part.sequence;
        item.attend.emplace().query_count = options_.token_count;
        item.result.certificates.resize(1);
        item.result.touched_row_counts = {static_cast<int64_t>(2 + layer)};
      }
    }
  }

  absl::Status Announce(void*) override {
    for (const StreamStepPart& part : options_.parts) {
      for (LayerRows& rows : *part.rows) rows.Commit(rows.token_count() + options_.token_count);
    }
    ++pending_;
    attended_ = 0;
    return absl::OkStatus();
  }
  uint64_t version() const override { return 5; }
  absl::Status Attend(int, const StepTensors& tensors, void* stream) override {
    if (pending_ == 0) return absl::FailedPreconditionError("begin the next step first");
    EXPECT_NE(stream, nullptr);
    auto* const exchange = static_cast<DeviceExchange*>(stream);
    const std::span<std::byte> shared = exchange->shared().bytes();
    *shared_ = shared.data();
    EXPECT_EQ(tensors.q.data, exchange->inputs());
    const auto* const out = reinterpret_cast<const std::byte*>(tensors.out.data);
    EXPECT_TRUE(out >= shared.data() && out < shared.data() + shared.size());
    std::memset(shared.data(), 0xFF, static_cast<size_t>(out - shared.data()));
    const auto at = [](const std::byte* data, int i) {
      float value;
      std::memcpy(&value, data + i * sizeof(value), sizeof(value));
      return value;
    };
    if (at(tensors.q.data, 0) < 0) return absl::InvalidArgumentError("q is negative");
    for (int i = 0; i < kDim; ++i) {
      const float sum =
          at(tensors.q.data, i) + 10 * at(tensors.k.data, i) + 100 * at(tensors.v.data, i);
      std::memcpy(tensors.out.data + i * sizeof(sum), &sum, sizeof(sum));
    }
    if (tensors.lse != nullptr) *tensors.lse = 42;
    ++attended_;
    return absl::OkStatus();
  }
  absl::Status Conclude(void*) override { return absl::OkStatus(); }
  int pending_count() const override { return pending_; }
  absl::StatusOr<Outcome> Settle() override {
    --pending_;
    Outcome outcome{attended_ > 0, std::vector<absl::Status>(options_.parts.size())};
    if (attended_ == 1) {
      for (absl::Status& status : outcome.parts) {
        status = absl::FailedPreconditionError("layer 1 was not attended");
      }
    }
    return outcome;
  }
  const Job& settled(int layer) const override { return jobs_.at(layer); }

 private:
  const StreamStepOptions options_;
  const std::byte** const shared_;
  std::array<Job, 2> jobs_;
  int pending_ = 0;
  int attended_ = 0;
};

class DoorbellDecoderTest : public EngineTest {
 protected:
  DoorbellDecoderTest() {
    gpu.make_stream_step = [this](StreamStepOptions options) {
      return std::make_unique<AddingStep>(std::move(options), &shared);
    };
    gpu_engine.emplace(&gpu, arena.get(), &budget, EngineOptions());
    ModelSpec spec = model->spec;
    gpu_model = *gpu_engine->CreateModel("g", spec, DefaultPolicy(spec));
    sequence =
        *gpu_engine->CreateSequence("s", gpu_model, gpu_model->policy, absl::InfiniteDuration());
    server.emplace(&*gpu_engine, &regions, &status);
    region = *server->Attach(Caller(), session, 0);
    memory = reinterpret_cast<DoorbellMemory*>(region->bytes.data());
  }
  ~DoorbellDecoderTest() override { regions.CloseSession(session); }
  void TearDown() override {
    EngineTest::TearDown();
    gpu.RefuseAll();
  }

  std::byte* data() const { return region->bytes.data() + DoorbellMemory::kDataOffset; }
  DoorbellAnswer Ring(const DoorbellCall& call) {
    memory->call = call;
    memory->rung.Ring(++rung);
    return Answered();
  }
  // Waits for the answer to the last call.
  DoorbellAnswer Answered() {
    BellWaiter waiter;
    const auto deadline = BellWaiter::Clock::now() + std::chrono::seconds(10);
    while (memory->answered.number.load() != rung && BellWaiter::Clock::now() < deadline) {
      waiter.Await(memory->answered, rung - 1, deadline);
    }
    EXPECT_EQ(memory->answered.number.load(), rung);
    return memory->answer;
  }
  DoorbellAnswer Ring(DoorbellCallKind kind, int layer = 0) { return Ring(CallOf(kind, layer)); }
  static DoorbellCall CallOf(DoorbellCallKind kind, int layer = 0) {
    DoorbellCall call = {};
    call.kind = kind;
    call.layer = layer;
    call.q_dtype = call.out_dtype = kF32;
    call.wants_lse = 1;
    return call;
  }
  // Begins a step of one token at the end of the sequence.
  DoorbellAnswer Begin() {
    v1::DecodeStep step;
    step.set_token_count(1);
    v1::DecodeStep::Part& part = *step.add_parts();
    part.set_sequence("sequences/s");
    part.set_token_start(sequence->snapshot().token_count);
    const std::string description = step.SerializeAsString();
    std::memcpy(data(), description.data(), description.size());
    DoorbellCall call = {};
    call.kind = DoorbellCallKind::kBegin;
    call.byte_count = static_cast<int64_t>(description.size());
    return Ring(call);
  }
  std::string Told(const DoorbellAnswer& answer) const {
    google::rpc::Status told;
    EXPECT_TRUE(told.ParseFromArray(memory->text, static_cast<int>(answer.text_bytes)));
    return told.message();
  }
  DoorbellAnswer Open(const std::string& trace_id = "") {
    v1::DecodeStep step;
    step.set_token_count(1);
    step.set_trace_id(trace_id);
    v1::DecodeStep::Part& part = *step.add_parts();
    part.set_sequence("sequences/s");
    part.set_token_start(sequence->snapshot().token_count);
    const std::string description = step.SerializeAsString();
    std::memcpy(data(), description.data(), description.size());
    DoorbellCall call = {};
    call.kind = DoorbellCallKind::kOpenDecoder;
    call.byte_count = static_cast<int64_t>(description.size());
    call.offset = 100;
    return Ring(call);
  }
  // Writes the tensors of one token and one head of 16 to their places.
  void Put(float q, float k, float v) { Put(const_cast<std::byte*>(shared), q, k, v); }
  static void Put(std::byte* to, float q, float k, float v) {
    const StepShape shape = {1, 1, 1, 1, kDim, kF32};
    const StepLayout layout(shape, DType::kF32, DType::kF32, DType::kF32);
    for (int i = 0; i < kDim; ++i) {
      const float values[] = {q, k, v};
      const int64_t offsets[] = {0, layout.k_offset, layout.v_offset};
      for (int t = 0; t < 3; ++t) std::memcpy(to + offsets[t] + i * 4, &values[t], 4);
    }
  }
  std::vector<float> Out() const {
    const StepShape shape = {1, 1, 1, 1, kDim, kF32};
    const StepLayout layout(shape, DType::kF32, DType::kF32, DType::kF32);
    std::vector<float> values(2);
    std::memcpy(&values[0], shared + layout.out_offset, 4);
    std::memcpy(&values[1], shared + layout.lse_offset, 4);
    return values;
  }
  bool Settles(const std::function<bool()>& condition) {
    for (int i = 0; i < 1000 && !condition(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return condition();
  }

  SharedToy gpu{"cuda:0", "GPU-a"};
  RegionTable regions{RegionTable::Kind::kSessions, &budget, &engine->accounts(), &gpu};
  std::vector<std::string> traces;  // traces of the refused calls, in order
  const StatusConverter status{"boot", "", [](const absl::Status& error) { return error; },
                               [this](const absl::Status&, const std::string&,
                                      std::string_view trace) { traces.emplace_back(trace); }};
  const std::string session = regions.OpenSession();
  std::optional<Engine> gpu_engine;
  std::shared_ptr<Model> gpu_model;
  std::shared_ptr<Sequence> sequence;
  std::optional<DoorbellServer> server;
  std::shared_ptr<Region> region;
  DoorbellMemory* memory = nullptr;
  // The shared memory of the last attend, which a client would have mapped.
  const std::byte* shared = nullptr;
  uint32_t rung = 0;
};

TEST_F(DoorbellDecoderTest, AttendsLayerByLayerAndLetsTheSequenceGo) {
  const DoorbellAnswer opened = Open();
  ASSERT_EQ(opened.code, 0) << Told(opened);
  DecoderMemory told;
  ASSERT_EQ(opened.byte_count, static_cast<int64_t>(sizeof(told)));
  std::memcpy(&told, data(), sizeof(told));
  EXPECT_EQ(told.byte_count, SharedDeviceMemory::kGranule);
  EXPECT_STREQ(told.device, "GPU-a");
  EXPECT_EQ(std::string(told.handle, sizeof(told.handle)), std::string(64, 'h'));
  EXPECT_EQ(opened.shape.sequence_count, 1);
  EXPECT_EQ(opened.shape.head_dim, kDim);
  EXPECT_TRUE(sequence->held);

  const DoorbellAnswer early = Ring(DoorbellCallKind::kDecoderAttend);
  EXPECT_EQ(early.code, 9);
  EXPECT_THAT(Told(early), HasSubstr("begin the next step"));
  for (int step = 0; step < 3; ++step) {
    const DoorbellAnswer next = Ring(DoorbellCallKind::kDecoderNext);
    ASSERT_EQ(next.code, 0);
    EXPECT_EQ(next.version, 5u);
    for (int layer = 0; layer < 2; ++layer) {
      // A first attend tells the test where the memory is.
      if (shared == nullptr) {
        ASSERT_EQ(Ring(DoorbellCallKind::kDecoderAttend).code, 0);
      }
      Put(1, 2, static_cast<float>(3 + step));
      ASSERT_EQ(Ring(DoorbellCallKind::kDecoderAttend, layer).code, 0);
      EXPECT_THAT(Out(), ElementsAre(static_cast<float>(321 + 100 * step), 42));
    }
  }
  ASSERT_EQ(Ring(DoorbellCallKind::kDecoderFinish).code, 0);
  // Each is asked for after another layer's.
  for (const int layer : {1, 0, 1}) {
    const DoorbellAnswer results = Ring(DoorbellCallKind::kDecoderResults, layer);
    ASSERT_EQ(results.code, 0);
    v1::AttendResponse response;
    ASSERT_TRUE(response.ParseFromArray(data(), static_cast<int>(results.byte_count)));
    ASSERT_EQ(response.results_size(), 1);
    EXPECT_THAT(response.results(0).statistics().touched_row_counts(), ElementsAre(2 + layer));
    const DoorbellAnswer summed = Ring(DoorbellCallKind::kDecoderSums, layer);
    AttendSums sums;
    ASSERT_EQ(summed.byte_count, static_cast<int64_t>(sizeof(sums)));
    std::memcpy(&sums, data(), sizeof(sums));
    EXPECT_EQ(sums.touched_row_count, 3 * (2 + layer));
  }
  EXPECT_EQ(Ring(DoorbellCallKind::kDecoderSums, 2).code, 3);
  EXPECT_EQ(Ring(DoorbellCallKind::kDecoderSums, -1).code, 3);
  EXPECT_EQ(Ring(DoorbellCallKind::kCloseDecoder).code, 0);
  EXPECT_FALSE(sequence->held);
  EXPECT_EQ(gpu.shared_count(), 0);
  EXPECT_EQ(sequence->snapshot().token_count, 3);
  EXPECT_EQ(Ring(DoorbellCallKind::kDecoderNext).code, 9);
}

TEST_F(DoorbellDecoderTest, WhatIsRefusedNamesTheTraceThatItWasOpenedIn) {
  EXPECT_EQ(Ring(DoorbellCallKind::kDecoderNext).code, 9);
  ASSERT_EQ(Open("job-7/3").code, 0);
  EXPECT_EQ(Ring(DoorbellCallKind::kDecoderAttend).code, 9);
  EXPECT_EQ(Ring(DoorbellCallKind::kDecoderSums, 2).code, 3);
  // Decoders with another trace and with none, and one that is refused because of its trace.
  ASSERT_EQ(Open("another").code, 0);
  EXPECT_EQ(Ring(DoorbellCallKind::kDecoderSums, 2).code, 3);
  ASSERT_EQ(Open().code, 0);
  EXPECT_EQ(Ring(DoorbellCallKind::kDecoderSums, 2).code, 3);
  const DoorbellAnswer refused = Open("two words");
  EXPECT_EQ(refused.code, 3);
  EXPECT_THAT(Told(refused), HasSubstr("trace_id: \"two words\", 9 characters"));
  EXPECT_THAT(traces, ElementsAre("", "job-7/3", "job-7/3", "another", "", ""));
}

TEST_F(DoorbellDecoderTest, AnErrorLeavesItOpen) {
  ASSERT_EQ(Open().code, 0);
  ASSERT_EQ(Ring(DoorbellCallKind::kDecoderNext).code, 0);
  ASSERT_EQ(Ring(DoorbellCallKind::kDecoderAttend).code, 0);
  Put(-1, 0, 0);
  const DoorbellAnswer refused = Ring(DoorbellCallKind::kDecoderAttend, 1);
  EXPECT_EQ(refused.code, 3);
  EXPECT_THAT(Told(refused), HasSubstr("q is negative"));
  for (const int layer : {-1, 2}) {
    EXPECT_THAT(Told(Ring(DoorbellCallKind::kDecoderAttend, layer)), HasSubstr("layer: value"));
  }
  Put(1, 0, 0);
  EXPECT_EQ(Ring(DoorbellCallKind::kDecoderAttend, 1).code, 0);
  EXPECT_EQ(Ring(DoorbellCallKind::kDecoderFinish).code, 0);
  EXPECT_EQ(sequence->snapshot().token_count, 1);
}

TEST_F(DoorbellDecoderTest, ASequenceIsHeldByOneAtATime) {
  ASSERT_EQ(Open().code, 0);
  const std::shared_ptr<Region> first = region;
  DoorbellMemory* const first_memory = memory;
  const uint32_t first_rung = rung;
  region = *server->Attach(Caller(), session, 0);
  memory = reinterpret_cast<DoorbellMemory*>(region->bytes.data());
  rung = 0;
  const DoorbellAnswer second = Open();
  EXPECT_EQ(second.code, 9);
  EXPECT_THAT(Told(second), HasSubstr("is held by an open decoder"));
  EXPECT_EQ(gpu.shared_count(), 1);
  region = first;
  memory = first_memory;
  rung = first_rung;
  EXPECT_EQ(Ring(DoorbellCallKind::kCloseDecoder).code, 0);
}

TEST_F(DoorbellDecoderTest, AClientThatGoesLetsTheSequenceGo) {
  ASSERT_EQ(Open().code, 0);
  // One whole step, and one that ends after its first layer.
  ASSERT_EQ(Ring(DoorbellCallKind::kDecoderNext).code, 0);
  for (int layer = 0; layer < 2; ++layer) {
    ASSERT_EQ(Ring(DoorbellCallKind::kDecoderAttend, layer).code, 0);
  }
  ASSERT_EQ(Ring(DoorbellCallKind::kDecoderFinish).code, 0);
  ASSERT_EQ(Ring(DoorbellCallKind::kDecoderNext).code, 0);
  ASSERT_EQ(Ring(DoorbellCallKind::kDecoderAttend).code, 0);
  EXPECT_TRUE(sequence->held);
  region.reset();
  regions.CloseSession(session);
  EXPECT_TRUE(Settles([this] { return !sequence->held; }));
  EXPECT_TRUE(Settles([this] { return gpu.shared_count() == 0; }));
  EXPECT_THAT(sequence->snapshot().layer_token_counts, ElementsAre(1, 1));
}

TEST_F(DoorbellDecoderTest, AStepEndsItAndItEndsAStep) {
  ASSERT_EQ(Open().code, 0);
  ASSERT_EQ(Begin().code, 0);
  EXPECT_FALSE(sequence->held);
  EXPECT_EQ(Ring(DoorbellCallKind::kDecoderNext).code, 9);
  ASSERT_EQ(Open().code, 0);
  EXPECT_EQ(Ring(DoorbellCallKind::kAttend).code, 9);
  EXPECT_EQ(Ring(DoorbellCallKind::kCloseDecoder).code, 0);
}

TEST_F(DoorbellDecoderTest, AStepUsesItsTensorsAsTheyWereWhenTheyWereChecked) {
  ASSERT_EQ(Begin().code, 0);
  Put(data(), 1, 2, 3);
  memory->call = CallOf(DoorbellCallKind::kAttend);
  memory->rung.Ring(++rung);
  ASSERT_TRUE(Settles([this] { return gpu.waiting_count() == 1; }));
  // They are checked, and the device has not begun.
  const float nan = std::numeric_limits<float>::quiet_NaN();
  Put(data(), nan, nan, nan);
  gpu.Release();
  ASSERT_EQ(Answered().code, 0);
  float row[2 * kDim];
  std::memcpy(row, sequence->rows[0].Row(0, 0), sizeof(row));
  EXPECT_EQ(row[0], 2);
  EXPECT_EQ(row[kDim], 3);
  const StepShape shape = {1, 1, 1, 1, kDim, kF32};
  const StepLayout layout(shape, DType::kF32, DType::kF32, DType::kF32);
  float out[2];
  std::memcpy(out, data() + layout.out_offset, sizeof(out));
  EXPECT_EQ(out[0], 1) << "one token is visible";
  EXPECT_EQ(out[1], 1) << "of q";
}

TEST_F(DoorbellDecoderTest, OfAllClientsTogetherItServes512) {
  MemoryBudget large(int64_t{256} << 20);
  RegionTable sessions(RegionTable::Kind::kSessions, &large, &engine->accounts(), &gpu);
  DoorbellServer full(&*gpu_engine, &sessions, &status);
  // A session has at most 256 regions.
  std::vector<std::string> clients = {sessions.OpenSession(), sessions.OpenSession(),
                                      sessions.OpenSession()};
  for (int i = 0; i < 512; ++i) {
    ASSERT_TRUE(full.Attach(Caller(), clients[i % 2], 0).ok()) << i;
  }
  const absl::Status refused = full.Attach(Caller(), clients[2], 0).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(refused).reason, "DOORBELL_COUNT_EXHAUSTED");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("has 512 doorbells already"));
  // Those of a client that has gone make room.
  sessions.CloseSession(clients[0]);
  EXPECT_TRUE(Settles([&] { return full.Attach(Caller(), clients[2], 0).ok(); }));
  for (const std::string& client : clients) sessions.CloseSession(client);
}

}  // namespace
}  // namespace spillway

#include "engine/stream_decoder.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/errors.h"
#include "gmock/gmock.h"
#include "host/base/mutex.h"
#include "tests/engine/engine_fixture.h"

namespace spillway {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// What the steps of a device should do, and the calls that were made.
struct Script {
  std::deque<absl::Status> announces;
  std::deque<absl::StatusOr<StreamStep::Outcome>>
      outcomes;  // of the steps, in order; if empty: success
  std::vector<std::string> calls;
  Mutex mutex;  // of calls, while a decoder works ahead
  // Of PlanningStep: the calls to plan, the plans that it made and dropped, and what the next calls
  // do instead.
  std::atomic<int> plan_call_count = 0;
  std::atomic<int> planned_count = 0;
  int dropped_count = 0;
  std::deque<std::function<absl::Status()>> plans;
};

// A step that follows the script. Streams are plain numbers.
class ScriptedStep final : public StreamStep {
 public:
  ScriptedStep(StreamStepOptions options, Script* script)
      : options_(std::move(options)), script_(script) {
    for (const StreamStepPart& part : options_.parts) {
      JobItem& item = job_.items.emplace_back();
      item.sequence = part.sequence;
      item.attend.emplace().query_count = options_.token_count;
      item.result.certificates.resize(1);
    }
  }
  ~ScriptedStep() override { script_->calls.push_back("gone"); }

  absl::Status Announce(void* stream) override {
    Note("announce", stream);
    if (!script_->announces.empty()) {
      absl::Status status = std::move(script_->announces.front());
      script_->announces.pop_front();
      if (!status.ok()) return status;
    }
    for (const StreamStepPart& part : options_.parts) {
      for (LayerRows& rows : *part.rows) rows.Commit(rows.token_count() + options_.token_count);
    }
    ++pending_;
    concluded_ = false;
    return absl::OkStatus();
  }
  uint64_t version() const override { return 1; }
  absl::Status Attend(int layer, const StepTensors&, void* stream) override {
    Note("attend " + std::to_string(layer), stream);
    return absl::OkStatus();
  }
  absl::Status Conclude(void* stream) override {
    if (pending_ > 0 && !concluded_) Note("conclude", stream);
    concluded_ = true;
    return absl::OkStatus();
  }
  int pending_count() const override { return pending_; }
  absl::StatusOr<Outcome> Settle() override {
    EndOldest();
    return TakeOutcome();
  }
  void EndOldest() { --pending_; }
  absl::StatusOr<Outcome> TakeOutcome() {
    {
      const MutexLock lock(script_->mutex);
      script_->calls.push_back("settle");
    }
    if (script_->outcomes.empty()) {
      return Outcome{true, std::vector<absl::Status>(options_.parts.size())};
    }
    absl::StatusOr<Outcome> outcome = std::move(script_->outcomes.front());
    script_->outcomes.pop_front();
    return outcome;
  }
  const Job& settled(int) const override { return job_; }

 private:
  void Note(const std::string& what, void* stream) {
    const MutexLock lock(script_->mutex);
    script_->calls.push_back(what + " on " + std::to_string(reinterpret_cast<intptr_t>(stream)));
  }

  const StreamStepOptions options_;
  Script* const script_;
  Job job_;
  int pending_ = 0;
  bool concluded_ = false;
};

class StreamDecoderTest : public EngineTest {
 protected:
  StreamDecoderTest() {
    device.make_stream_step = [this](StreamStepOptions options) {
      return std::make_unique<ScriptedStep>(std::move(options), &script_);
    };
  }

  // A sequence with `count` tokens in both layers.
  std::shared_ptr<Sequence> Filled(const std::string& id, int64_t count) {
    std::shared_ptr<Sequence> sequence = NewSequence(id);
    EXPECT_TRUE(Fill(sequence, Rows(1, count, 2), 0, count).ok());
    return sequence;
  }
  StreamDecoder::Part PartOf(const std::shared_ptr<Sequence>& sequence) {
    return {sequence, sequence->snapshot().token_count, 0, model->policy};
  }
  std::unique_ptr<StreamDecoder> Open(std::vector<StreamDecoder::Part> parts,
                                      int64_t token_count = 1) {
    auto decoder = StreamDecoder::Create(&*engine, std::move(parts), token_count, 100);
    EXPECT_TRUE(decoder.ok()) << decoder.status();
    return *std::move(decoder);
  }
  static void* Stream(intptr_t number) { return reinterpret_cast<void*>(number); }
  static std::vector<int64_t> Counts(const Sequence& sequence) {
    return sequence.snapshot().layer_token_counts;
  }

  Script script_;
};

TEST_F(StreamDecoderTest, StepsFollowEachOtherTwoOnTheirWay) {
  const auto sequence = Filled("s", 5);
  {
    const auto decoder = Open({PartOf(sequence)}, 2);
    ASSERT_TRUE(decoder->Next(Stream(7)).ok());
    ASSERT_TRUE(decoder->Attend(1, {}, Stream(8)).ok());
    ASSERT_TRUE(decoder->Next(Stream(7)).ok());
    ASSERT_TRUE(decoder->Next(Stream(7)).ok());
    EXPECT_THAT(script_.calls,
                ElementsAre("announce on 7", "attend 1 on 8", "conclude on 7", "announce on 7",
                            "conclude on 7", "settle", "announce on 7"));
    // As of the last settling: one step had ended, and the next was pending.
    EXPECT_THAT(Counts(*sequence), ElementsAre(9, 9));
    EXPECT_EQ(sequence->work.appended_row_count, 5 * 2 + 2 * 2);
    EXPECT_EQ(sequence->work.attend_count, 2 * 2);
    script_.calls.clear();
    ASSERT_TRUE(decoder->Finish(Stream(9)).ok());
    EXPECT_THAT(script_.calls, ElementsAre("conclude on 9", "settle", "settle"));
    EXPECT_THAT(Counts(*sequence), ElementsAre(11, 11));
    ASSERT_TRUE(decoder->Next(Stream(7)).ok());
    script_.calls.clear();
  }
  EXPECT_THAT(script_.calls, ElementsAre("conclude on 7", "settle", "gone"));
  EXPECT_THAT(Counts(*sequence), ElementsAre(13, 13));
}

TEST_F(StreamDecoderTest, RunsAGraphWithItsAttendsInTheirPlaces) {
  // Its attends are of layers 1 and 0.
  class OfCaller final : public StepGraph {
   public:
    explicit OfCaller(Script* script) : script_(script) {}
    absl::Status LeaveOpen(int, const StepTensors&, void*) override { return absl::OkStatus(); }
    absl::Status Complete(void*) override { return absl::OkStatus(); }
    const std::vector<OpenAttend>& attends() const override { return attends_; }
    absl::Status RunPiece(int64_t piece, void* stream) override {
      script_->calls.push_back("piece " + std::to_string(piece) + " on " +
                               std::to_string(reinterpret_cast<intptr_t>(stream)));
      return absl::OkStatus();
    }

   private:
    Script* const script_;
    const std::vector<OpenAttend> attends_ = {{1, {}}, {0, {}}};
  };
  const auto sequence = Filled("s", 5);
  const auto decoder = Open({PartOf(sequence)});
  OfCaller graph(&script_);
  ASSERT_TRUE(decoder->Next(Stream(7)).ok());
  ASSERT_TRUE(decoder->Run(graph, Stream(8)).ok());
  ASSERT_TRUE(decoder->Finish(Stream(7)).ok());
  EXPECT_THAT(script_.calls,
              ElementsAre("announce on 7", "piece 0 on 8", "attend 1 on 8", "piece 1 on 8",
                          "attend 0 on 8", "piece 2 on 8", "conclude on 7", "settle"));
  EXPECT_THAT(Counts(*sequence), ElementsAre(6, 6));
}

TEST_F(StreamDecoderTest, AnErrorTakesItsStepAndLaterOnesFromItsSequence) {
  const auto good = Filled("good", 5), bad = Filled("bad", 9);
  const auto decoder = Open({PartOf(good), PartOf(bad)});
  script_.outcomes.push_back(StreamStep::Outcome{true, {absl::OkStatus(), absl::OkStatus()}});
  script_.outcomes.push_back(
      StreamStep::Outcome{true, {absl::OkStatus(), absl::OutOfRangeError("NaN at layer 1")}});
  ASSERT_TRUE(decoder->Next(nullptr).ok());
  ASSERT_TRUE(decoder->Next(nullptr).ok());
  ASSERT_TRUE(decoder->Next(nullptr).ok());
  const absl::Status status = decoder->Next(nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(std::string(status.message()), "sequences/bad: NaN at layer 1");
  EXPECT_THAT(Counts(*good), ElementsAre(7, 7));
  EXPECT_THAT(Counts(*bad), ElementsAre(10, 10));
  // The failed call began no step, and decoding goes on.
  ASSERT_TRUE(decoder->Finish(nullptr).ok());
  ASSERT_TRUE(decoder->Next(nullptr).ok());
  ASSERT_TRUE(decoder->Finish(nullptr).ok());
  EXPECT_THAT(Counts(*good), ElementsAre(8, 8));
  EXPECT_THAT(Counts(*bad), ElementsAre(11, 11));
}

TEST_F(StreamDecoderTest, AStepThatDidNotRunIsTakenBack) {
  const auto sequence = Filled("s", 5);
  const auto decoder = Open({PartOf(sequence)});
  const absl::Status missing = absl::FailedPreconditionError("layer 0 was not attended");
  script_.outcomes.push_back(StreamStep::Outcome{false, {missing}});
  ASSERT_TRUE(decoder->Next(nullptr).ok());
  ASSERT_TRUE(decoder->Finish(nullptr).ok());
  EXPECT_THAT(Counts(*sequence), ElementsAre(5, 5));
  // If a later step did run, its positions were wrong.
  script_.outcomes.push_back(StreamStep::Outcome{false, {missing}});
  script_.outcomes.push_back(StreamStep::Outcome{true, {absl::OkStatus()}});
  ASSERT_TRUE(decoder->Next(nullptr).ok());
  ASSERT_TRUE(decoder->Next(nullptr).ok());
  const absl::Status status = decoder->Finish(nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("none of the layers of a step were attended"));
  EXPECT_THAT(Counts(*sequence), ElementsAre(5, 5));
}

TEST_F(StreamDecoderTest, TokensThatADeviceErrorMayHaveLostAreDropped) {
  const auto sequence = Filled("s", 5);
  const absl::Status lost = absl::InternalError("the GPU is lost");
  {
    const auto decoder = Open({PartOf(sequence)});
    script_.outcomes.push_back(lost);
    ASSERT_TRUE(decoder->Next(nullptr).ok());
    EXPECT_EQ(decoder->Finish(nullptr), lost);
    EXPECT_EQ(decoder->Next(nullptr), lost);
    EXPECT_EQ(decoder->Attend(0, {}, nullptr), lost);
  }
  EXPECT_THAT(Counts(*sequence), ElementsAre(5, 5));
  {
    const auto decoder = Open({PartOf(sequence)});
    script_.outcomes.push_back(
        StreamStep::Outcome{true, {absl::OutOfRangeError("NaN at layer 1")}});
    script_.outcomes.push_back(lost);
    ASSERT_TRUE(decoder->Next(nullptr).ok());
    ASSERT_TRUE(decoder->Next(nullptr).ok());
    EXPECT_EQ(decoder->Finish(nullptr), lost);
  }
  EXPECT_THAT(Counts(*sequence), ElementsAre(5, 5));
}

TEST_F(StreamDecoderTest, HoldsItsSequences) {
  const auto held = Filled("held", 5), free = Filled("free", 5);
  const std::vector<float> rows = Rows(1, 1, 2);
  auto decoder = Open({PartOf(held)});
  const auto expect_held = [](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(DetailsOf(status).reason, "SEQUENCE_HELD");
  };
  expect_held(Fill(held, rows, 5, 1));
  AttendRequest request;
  request.items.push_back(Item(free));
  request.items.push_back(Item(held));
  std::optional<absl::StatusOr<AttendOutcome>> attend;
  engine->Attend(std::move(request), Into(&attend));
  expect_held(attend->status());
  std::optional<absl::StatusOr<std::shared_ptr<Sequence>>> fork;
  engine->Fork(held, "f", Into(&fork));
  expect_held(fork->status());
  absl::Status status;
  const auto into = [&status](absl::Status is) { status = std::move(is); };
  engine->Truncate(held, 1, into);
  expect_held(status);
  engine->Delete("held", into);
  expect_held(status);
  engine->DeleteSealed("held", into);
  expect_held(status);
  engine->Seal(held, true, into);
  expect_held(status);
  EXPECT_TRUE(engine->registry().FindSequence("held").ok());
  std::optional<absl::StatusOr<SharedRows>> shared;
  engine->ShareRows(held, 0, Into(&shared));
  expect_held(shared->status());
  // If the second sequence is refused, the first is released.
  expect_held(StreamDecoder::Create(&*engine, {PartOf(free), PartOf(held)}, 1, 100).status());
  EXPECT_TRUE(Fill(free, rows, 5, 1).ok());
  decoder.reset();
  EXPECT_TRUE(Fill(held, rows, 5, 1).ok());
  engine->Delete("held", into);
  EXPECT_TRUE(status.ok());
}

TEST_F(StreamDecoderTest, IsHeldBeyondItsTtl) {
  const auto sequence = NewSequence("s", absl::Seconds(10));
  auto decoder = Open({PartOf(sequence)});
  now += std::chrono::seconds(20);
  EXPECT_TRUE(engine->SweepExpired().empty());
  ASSERT_TRUE(decoder->Next(nullptr).ok());  // this renews the ttl
  decoder.reset();
  EXPECT_TRUE(engine->SweepExpired().empty());
  now += std::chrono::seconds(20);
  EXPECT_EQ(engine->SweepExpired().size(), 1u);
}

TEST_F(StreamDecoderTest, RefusesWhatDoesNotFit) {
  const auto sequence = Filled("s", 5);
  const auto refused = [&](StreamDecoder::Part part, int64_t count, int64_t most) {
    return std::string(StreamDecoder::Create(&*engine, {part}, count, most).status().message());
  };
  StreamDecoder::Part part = PartOf(sequence);
  EXPECT_THAT(refused(part, 0, 100), HasSubstr("token_count: value 0 is not in [1, 16]"));
  EXPECT_THAT(refused(part, 17, 100), HasSubstr("token_count: value 17 is not in [1, 16]"));
  EXPECT_THAT(refused(part, 2, 1), HasSubstr("token_count_max: value 1 is not in [2, "));
  EXPECT_THAT(refused(part, 2, int64_t{1} << 40), HasSubstr("token_count_max"));
  part.start = 4;
  EXPECT_THAT(refused(part, 1, 100), HasSubstr("has 5 tokens, but the step starts at token 4"));
  part.start = 5;
  part.generation = 3;
  EXPECT_THAT(refused(part, 1, 100), HasSubstr("is at generation 0"));
  EXPECT_THAT(std::string(StreamDecoder::Create(&*engine, {}, 1, 100).status().message()),
              HasSubstr("0 sequences are not in [1, 256]"));
  EXPECT_THAT(
      std::string(StreamDecoder::Create(&*engine, {PartOf(sequence), PartOf(sequence)}, 1, 100)
                      .status()
                      .message()),
      HasSubstr("is named twice"));
  // None of the refused calls holds the sequence.
  EXPECT_TRUE(Fill(sequence, Rows(1, 1, 2), 5, 1).ok());
  device.make_stream_step = nullptr;
  const absl::Status none = StreamDecoder::Create(&*engine, {PartOf(sequence)}, 1, 100).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(none.message()), HasSubstr("toy:0 has no streams"));
  EXPECT_TRUE(Fill(sequence, Rows(1, 1, 2), 6, 1).ok());
}

TEST_F(StreamDecoderTest, WhatCannotBeBegunLeavesNothing) {
  const auto sequence = Filled("s", 5), other = Filled("o", 5);
  const auto decoder = Open({PartOf(sequence), PartOf(other)});
  script_.announces.push_back(absl::OutOfRangeError("beyond"));
  EXPECT_EQ(decoder->Next(nullptr).code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(Counts(*sequence), ElementsAre(5, 5));
  device.FailPrepare(absl::ResourceExhaustedError("full"));
  EXPECT_EQ(decoder->Next(nullptr).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Counts(*sequence), ElementsAre(5, 5));
  EXPECT_EQ(decoder->Attend(2, {}, nullptr).code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(decoder->Next(nullptr).ok());
  ASSERT_TRUE(decoder->Finish(nullptr).ok());
  EXPECT_THAT(Counts(*other), ElementsAre(6, 6));
}

TEST_F(StreamDecoderTest, WhatCannotBeBegunGivesBackThePagesOfAllSequences) {
  // The next token begins a page in both layers of both sequences, which have 4 pages now.
  const auto first = Filled("first", 128), second = Filled("second", 128);
  const auto decoder = Open({PartOf(first), PartOf(second)});
  device.FailPrepare(absl::ResourceExhaustedError("full"), 2);
  EXPECT_EQ(decoder->Next(nullptr).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(model->row_pool.used_page_count(), 4);
  EXPECT_EQ(ToyDevice::RoomOf(*first->device), 128);
  script_.announces.push_back(absl::OutOfRangeError("beyond"));
  EXPECT_EQ(decoder->Next(nullptr).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(model->row_pool.used_page_count(), 4);
  EXPECT_EQ(ToyDevice::RoomOf(*second->device), 128);
  ASSERT_TRUE(decoder->Next(nullptr).ok());
  EXPECT_EQ(model->row_pool.used_page_count(), 8);
  ASSERT_TRUE(decoder->Finish(nullptr).ok());
}

TEST_F(StreamDecoderTest, LayersAreOfOneLength) {
  const auto sequence = Filled("s", 5);
  std::optional<absl::StatusOr<AppendOutcome>> result;
  const std::vector<float> rows = Rows(1, 1);
  engine->Append({sequence, ChunkOf(rows, 5, 1), nullptr}, Into(&result));
  device.ReleaseAll();
  ASSERT_TRUE(result->ok());
  const auto decoder = Open({PartOf(sequence)});
  EXPECT_THAT(std::string(decoder->Next(nullptr).message()),
              HasSubstr("layers with 6 and with 5 tokens"));
}

// A step that plans the next one and collects ended ones in another thread, as the decoder asks. It
// fails the test if it is used in a way that a device need not bear.
class PlanningStep final : public StreamStep {
 public:
  PlanningStep(StreamStepOptions options, Script* script)
      : lengths_(Lengths(options)), step_(std::move(options), script), script_(script) {}

  absl::Status Announce(void* stream) override {
    if (planned_.has_value()) EXPECT_EQ(*planned_, lengths_());
    const absl::Status status = step_.Announce(stream);
    if (status.ok()) planned_.reset();
    return status;
  }
  bool works_ahead() const override { return true; }
  absl::Status PlanAhead() override {
    EXPECT_FALSE(planned_.has_value());
    ++script_->plan_call_count;
    if (!script_->plans.empty()) {
      const std::function<absl::Status()> plan = std::move(script_->plans.front());
      script_->plans.pop_front();
      if (plan != nullptr) return plan();
    }
    planned_ = lengths_();
    ++script_->planned_count;
    return absl::OkStatus();
  }
  bool is_planned() const override { return planned_.has_value(); }
  void DropPlan() override {
    if (!planned_.has_value()) return;
    // The rows are as they were when it was planned.
    EXPECT_EQ(*planned_, lengths_());
    planned_.reset();
    ++script_->dropped_count;
  }
  const absl::StatusOr<Outcome>* Collect() override {
    if (++collect_count_ % 3 == 0) return nullptr;
    if (!collected_.has_value()) collected_ = step_.TakeOutcome();
    return &*collected_;
  }
  absl::StatusOr<Outcome> Settle() override {
    step_.EndOldest();
    return collected_.has_value() ? *std::exchange(collected_, std::nullopt) : step_.TakeOutcome();
  }
  uint64_t version() const override { return step_.version(); }
  absl::Status Attend(int layer, const StepTensors& tensors, void* stream) override {
    return step_.Attend(layer, tensors, stream);
  }
  absl::Status Conclude(void* stream) override { return step_.Conclude(stream); }
  int pending_count() const override { return step_.pending_count(); }
  const Job& settled(int layer) const override { return step_.settled(layer); }

 private:
  static std::function<std::vector<int64_t>()> Lengths(const StreamStepOptions& options) {
    std::vector<const std::vector<LayerRows>*> rows;
    for (const StreamStepPart& part : options.parts) rows.push_back(part.rows);
    return [rows] {
      std::vector<int64_t> lengths;
      for (const auto* of_part : rows) lengths.push_back(of_part->front().token_count());
      return lengths;
    };
  }

  const std::function<std::vector<int64_t>()> lengths_;
  ScriptedStep step_;
  Script* const script_;
  std::optional<std::vector<int64_t>> planned_;
  std::optional<absl::StatusOr<Outcome>> collected_;
  int collect_count_ = 0;  // the third finds that the step has not ended
};

class DecoderAheadTest : public StreamDecoderTest {
 protected:
  DecoderAheadTest() {
    device.make_stream_step = [this](StreamStepOptions options) {
      return std::make_unique<PlanningStep>(std::move(options), &script_);
    };
  }
  static StreamStep::Outcome Ran(std::vector<absl::Status> parts) {
    return {true, std::move(parts)};
  }
  // Waits until the thread has come so far. Otherwise Finish() may come before it has begun.
  static void WaitUntil(const std::function<bool()>& is_so_far) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!is_so_far()) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
      std::this_thread::yield();
    }
  }
  void WaitForPlans(int count) const {
    WaitUntil([&] { return script_.planned_count >= count; });
  }
  int CallCount(const std::string& call) {
    const MutexLock lock(script_.mutex);
    return static_cast<int>(std::ranges::count(script_.calls, call));
  }
};

TEST_F(DecoderAheadTest, StepsArePlannedFromTheThirdOn) {
  const auto sequence = Filled("s", 5);
  {
    const auto decoder = Open({PartOf(sequence)}, 2);
    for (int step = 0; step < 5; ++step) {
      ASSERT_TRUE(decoder->Next(Stream(7)).ok());
      ASSERT_TRUE(decoder->Attend(1, {}, Stream(7)).ok());
    }
    WaitForPlans(4);
    ASSERT_TRUE(decoder->Finish(Stream(7)).ok());
    EXPECT_EQ(script_.planned_count, 4);
    EXPECT_EQ(script_.dropped_count, 0);
    EXPECT_THAT(Counts(*sequence), ElementsAre(15, 15));
    EXPECT_EQ(sequence->work.appended_row_count, 5 * 2 + 5 * 2 * 2);
    EXPECT_EQ(sequence->work.attend_count, 5 * 2 * 2);
    EXPECT_EQ(decoder->sums(0).attend_count, 5 * 2);
    EXPECT_NE(decoder->ended(0), nullptr);
    // The plan holds after Finish().
    ASSERT_TRUE(decoder->Next(Stream(7)).ok());
    EXPECT_EQ(decoder->ended(0), nullptr);
    WaitForPlans(5);
    ASSERT_TRUE(decoder->Finish(Stream(7)).ok());
    EXPECT_EQ(script_.planned_count, 5);
    EXPECT_EQ(script_.dropped_count, 0);
  }
  EXPECT_EQ(script_.dropped_count, 1);
  EXPECT_THAT(Counts(*sequence), ElementsAre(17, 17));
}

TEST_F(DecoderAheadTest, PagesOfAStepThatNeverComesAreGivenBack) {
  const auto sequence = Filled("s", 126);
  EXPECT_EQ(model->row_pool.used_page_count(), 2);
  {
    StreamDecoder::Part part = PartOf(sequence);
    auto decoder = StreamDecoder::Create(&*engine, {part}, 1, 1000);
    ASSERT_TRUE(decoder.ok());
    ASSERT_TRUE((*decoder)->Next(nullptr).ok());
    ASSERT_TRUE((*decoder)->Next(nullptr).ok());
    WaitForPlans(1);
    ASSERT_TRUE((*decoder)->Finish(nullptr).ok());
    // Token 128 begins a page in both layers.
    EXPECT_EQ(model->row_pool.used_page_count(), 4);
    EXPECT_EQ(ToyDevice::RoomOf(*sequence->device), 129);
  }
  EXPECT_EQ(model->row_pool.used_page_count(), 2);
  EXPECT_EQ(ToyDevice::RoomOf(*sequence->device), 128);
  EXPECT_THAT(Counts(*sequence), ElementsAre(128, 128));
}

TEST_F(DecoderAheadTest, AnErrorDropsThePlanOfALaterStep) {
  const auto good = Filled("good", 5), bad = Filled("bad", 9);
  const auto decoder = Open({PartOf(good), PartOf(bad)});
  script_.outcomes.push_back(Ran({absl::OkStatus(), absl::OkStatus()}));
  script_.outcomes.push_back(Ran({absl::OkStatus(), absl::OutOfRangeError("NaN at layer 1")}));
  for (int step = 0; step < 3; ++step) ASSERT_TRUE(decoder->Next(nullptr).ok());
  const absl::Status status = decoder->Next(nullptr);
  EXPECT_EQ(std::string(status.message()), "sequences/bad: NaN at layer 1");
  EXPECT_THAT(Counts(*good), ElementsAre(7, 7));
  EXPECT_THAT(Counts(*bad), ElementsAre(10, 10));
  EXPECT_EQ(good->work.attend_count, 2 * 2);
  EXPECT_EQ(bad->work.attend_count, 1 * 2);
  EXPECT_EQ(script_.planned_count, 2);
  EXPECT_EQ(script_.dropped_count, 1);
  EXPECT_EQ(ToyDevice::RoomOf(*bad->device), 10);
  ASSERT_TRUE(decoder->Next(nullptr).ok());
  ASSERT_TRUE(decoder->Next(nullptr).ok());
  ASSERT_TRUE(decoder->Finish(nullptr).ok());
  EXPECT_THAT(Counts(*good), ElementsAre(9, 9));
  EXPECT_THAT(Counts(*bad), ElementsAre(12, 12));
  EXPECT_EQ(decoder->sums(1).attend_count, 3 + 4);
}

TEST_F(DecoderAheadTest, WhatCannotBePreparedAheadIsTriedAgain) {
  const auto sequence = Filled("s", 5), other = Filled("o", 5);
  const auto decoder = Open({PartOf(sequence), PartOf(other)});
  // Four calls for each of two steps; the third is prepared ahead.
  device.FailPrepare(absl::ResourceExhaustedError("full"), 2 * 4 + 3);
  for (int step = 0; step < 4; ++step) ASSERT_TRUE(decoder->Next(nullptr).ok());
  WaitForPlans(2);
  ASSERT_TRUE(decoder->Finish(nullptr).ok());
  EXPECT_EQ(script_.planned_count, 2);
  EXPECT_THAT(Counts(*other), ElementsAre(9, 9));
}

TEST_F(DecoderAheadTest, APlanThatIsNotTakenServesTheNextCall) {
  const auto sequence = Filled("s", 5);
  const auto decoder = Open({PartOf(sequence)});
  for (int step = 0; step < 2; ++step) ASSERT_TRUE(decoder->Next(nullptr).ok());
  script_.announces.push_back(absl::FailedPreconditionError("captured"));
  EXPECT_EQ(decoder->Next(nullptr).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ToyDevice::RoomOf(*sequence->device), 8);
  ASSERT_TRUE(decoder->Next(nullptr).ok());
  WaitForPlans(2);
  ASSERT_TRUE(decoder->Finish(nullptr).ok());
  EXPECT_EQ(script_.planned_count, 2);
  EXPECT_EQ(script_.dropped_count, 0);
  EXPECT_THAT(Counts(*sequence), ElementsAre(8, 8));
}

TEST_F(DecoderAheadTest, WhatFailsAheadIsDoneByTheCaller) {
  const auto sequence = Filled("s", 5);
  const std::function<absl::Status()> failing[] = {
      [] { return absl::InternalError("no plan"); },
      []() -> absl::Status { throw std::bad_alloc(); }};
  for (const auto& plan : failing) {
    const int64_t before = sequence->snapshot().token_count;
    script_.plan_call_count = 0;
    {
      const auto decoder = Open({PartOf(sequence)});
      script_.plans = {plan, nullptr, plan};
      for (int step = 0; step < 3; ++step) ASSERT_TRUE(decoder->Next(nullptr).ok());
      ASSERT_TRUE(decoder->Next(nullptr).ok());
      WaitUntil([&] { return script_.plan_call_count == 3; });
    }
    EXPECT_EQ(sequence->snapshot().token_count, before + 4);
    EXPECT_EQ(ToyDevice::RoomOf(*sequence->device), before + 4);
  }
}

TEST_F(DecoderAheadTest, NothingIsPlannedBeyondTheCapacity) {
  const auto sequence = Filled("s", 5);
  auto decoder = StreamDecoder::Create(&*engine, {PartOf(sequence)}, 1, 8);
  ASSERT_TRUE(decoder.ok());
  for (int step = 0; step < 3; ++step) ASSERT_TRUE((*decoder)->Next(nullptr).ok());
  // The oldest step is collected after the next one would be planned.
  WaitUntil([&] { return CallCount("settle") == 2; });
  ASSERT_TRUE((*decoder)->Finish(nullptr).ok());
  EXPECT_EQ(script_.planned_count, 1);
  EXPECT_EQ(ToyDevice::RoomOf(*sequence->device), 8);
}

TEST_F(DecoderAheadTest, ALostDeviceLeavesNoPlan) {
  const auto sequence = Filled("s", 5);
  const absl::Status lost = absl::InternalError("the GPU is lost");
  {
    const auto decoder = Open({PartOf(sequence)});
    script_.outcomes.push_back(Ran({absl::OkStatus()}));
    script_.outcomes.push_back(lost);
    for (int step = 0; step < 3; ++step) ASSERT_TRUE(decoder->Next(nullptr).ok());
    EXPECT_EQ(decoder->Next(nullptr), lost);
    EXPECT_EQ(decoder->Finish(nullptr), lost);
  }
  EXPECT_EQ(script_.dropped_count, 1);
  EXPECT_THAT(Counts(*sequence), ElementsAre(6, 6));
  EXPECT_EQ(ToyDevice::RoomOf(*sequence->device), 6);
}

}  // namespace
}  // namespace spillway

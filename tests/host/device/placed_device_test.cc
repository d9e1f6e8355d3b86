#include "host/device/placed_device.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/host/device/fake_device.h"

namespace spillway {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kLimit = 1600;
constexpr int64_t kShare = kLimit / 16;

// A placed device over fakes "cuda:0", "cuda:1", ... with a model.
class PlacedDeviceTest : public ::testing::Test {
 protected:
  void Open(size_t count) {
    std::vector<std::unique_ptr<Device>> devices;
    for (size_t i = 0; i < count; ++i) {
      auto fake = std::make_unique<FakeDevice>(absl::StrCat("cuda:", i));
      fake->own_memory = DeviceMemory{kLimit, 0};
      fakes.push_back(fake.get());
      devices.push_back(std::move(fake));
    }
    device = CreatePlacedDevice(std::move(devices));
    model = *device->CreateModel(ModelSpec(), {});
  }

  std::unique_ptr<DeviceSequence> Create() { return *device->CreateSequence(*model); }
  // Creates a sequence, which lives as long as the test, and returns its device.
  int Place() {
    sequences.push_back(Create());
    return DeviceOf(*sequences.back());
  }
  std::vector<int> Place(int count) {
    std::vector<int> places;
    places.reserve(count);
    for (int i = 0; i < count; ++i) places.push_back(Place());
    return places;
  }
  // The device that serves a job of this sequence.
  int DeviceOf(DeviceSequence& sequence) {
    auto job = std::make_unique<Job>();
    job->model = model.get();
    job->items.push_back(Item(sequence, 2));
    int answer = -1;
    device->Submit(std::move(job), [&](std::unique_ptr<Job> done) {
      answer = static_cast<int>(done->items[0].result.out[0]);
    });
    return answer;
  }
  void Fill(DeviceSequence& sequence) {
    EXPECT_TRUE(device->PrepareAppend(*model, sequence, 0, 0, 1).ok());
  }

  static JobItem Item(DeviceSequence& sequence, int64_t query_count) {
    JobItem item;
    item.sequence = &sequence;
    item.attend.emplace();
    item.attend->query_count = query_count;
    return item;
  }

  std::vector<FakeDevice*> fakes;
  std::unique_ptr<Device> device;
  std::unique_ptr<DeviceModel> model;
  std::vector<std::unique_ptr<DeviceSequence>> sequences;
};

// ---- Memory that is shared

TEST_F(PlacedDeviceTest, SharedMemoryIsOfThePartThatIsNamed) {
  Open(2);
  // The fakes have no memory to share; the named one says so.
  for (const char* name : {"cuda:0", "cuda:1"}) {
    const absl::Status status = device->AllocateShared(name, 1).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr(absl::StrCat(name, " has no memory of its own")));
  }
  const absl::Status status = device->AllocateShared("cuda:2", 1).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("value cuda:2 is not a device of the engine, which has: "
                                          "cuda:0 (GPU-cuda:0), cuda:1 (GPU-cuda:1)"));
  EXPECT_TRUE(absl::IsUnimplemented(device->OpenExchange(1, 1).status()));
  fakes[0]->own_memory->shared_used_bytes = 3;
  fakes[1]->own_memory->shared_used_bytes = 4;
  EXPECT_EQ(device->memory()->shared_used_bytes, 7);
}

// ---- Placement

TEST_F(PlacedDeviceTest, ASequenceGoesWhereMostMemoryIsFree) {
  Open(3);
  fakes[0]->own_memory->used_bytes = 900;
  fakes[1]->own_memory->used_bytes = 500;
  fakes[2]->own_memory->used_bytes = 1400;
  EXPECT_EQ(Place(), 1);
  Fill(*sequences.back());
  fakes[1]->own_memory->used_bytes = 1200;
  EXPECT_EQ(Place(), 0);
  Fill(*sequences.back());
  // The free bytes count, not the free share of the limit.
  fakes[2]->own_memory = DeviceMemory{16000, 15000};
  EXPECT_EQ(Place(), 2);
}

TEST_F(PlacedDeviceTest, ABurstOverEqualDevicesTakesTurnsFromTheFirst) {
  Open(3);
  EXPECT_THAT(Place(7), ElementsAre(0, 1, 2, 0, 1, 2, 0));
}

TEST_F(PlacedDeviceTest, ABurstSpreadsAsIfItsSequencesWereFilled) {
  Open(2);
  fakes[1]->own_memory->used_bytes = 4 * kShare;
  // The first device has more free memory and gets three sequences, then the devices take turns.
  const std::vector<int> places = Place(9);
  EXPECT_EQ(std::count(places.begin(), places.begin() + 3, 0), 3);
  EXPECT_EQ(std::count(places.begin(), places.end(), 0), 6);
}

TEST_F(PlacedDeviceTest, AFilledSequenceCountsByTheMemoryThatItTakes) {
  Open(2);
  fakes[1]->own_memory->used_bytes = 4 * kShare;
  for (int i = 0; i < 9; ++i) {
    EXPECT_EQ(Place(), 0);
    Fill(*sequences.back());
    Fill(*sequences.back());  // the second append changes nothing
  }
}

TEST_F(PlacedDeviceTest, AnAppendThatIsRefusedFillsNothing) {
  Open(2);
  EXPECT_THAT(Place(2), ElementsAre(0, 1));
  fakes[0]->prepare_status = absl::ResourceExhaustedError("full");
  EXPECT_EQ(device->PrepareAppend(*model, *sequences[0], 0, 0, 1), fakes[0]->prepare_status);
  Fill(*sequences[1]);
  // The first sequence still counts as a share, one byte more than the second device uses.
  fakes[1]->own_memory->used_bytes = kShare - 1;
  EXPECT_EQ(Place(), 1);
}

TEST_F(PlacedDeviceTest, AmongNearlyEqualDevicesTheOneWithFewestSequences) {
  Open(2);
  fakes[0]->own_memory->used_bytes = kShare;
  EXPECT_THAT(Place(2), ElementsAre(1, 0));
  Fill(*sequences[0]);
  Fill(*sequences[1]);
  // One sequence each: the device with more free memory is next.
  EXPECT_EQ(Place(), 1);
  Fill(*sequences[2]);
  // The first device has fewer sequences, and is a share behind.
  EXPECT_EQ(Place(), 0);
  Fill(*sequences[3]);
  EXPECT_EQ(Place(), 1);
  Fill(*sequences[4]);
  // Now it is more than a share behind.
  fakes[0]->own_memory->used_bytes = kShare + 1;
  EXPECT_EQ(Place(), 1);
}

TEST_F(PlacedDeviceTest, AShareIsOfTheLargestDevice) {
  Open(2);
  // A share is 1,000 bytes, and the second device is 600 behind.
  fakes[1]->own_memory = DeviceMemory{16000, 15000};
  for (const int device : {0, 1, 0, 1}) {
    EXPECT_EQ(Place(), device);
    Fill(*sequences.back());
  }
}

TEST_F(PlacedDeviceTest, ASequenceHasAHome) {
  Open(2);
  const std::unique_ptr<DeviceSequence> first = Create(), second = Create();
  EXPECT_EQ(&device->HomeOf(*first), fakes[0]);
  EXPECT_EQ(&device->HomeOf(*second), fakes[1]);
  // Any device can fetch rows to host memory.
  MemoryBudget budget{kSlabBytes};
  const auto arena = *Arena::Create({.limit_bytes = kSlabBytes}, &budget);
  ModelSpec spec;
  spec.kv_head_count = 1;
  spec.head_dim = 16;
  PagePool pool{arena.get(), kPageTokenCount * spec.row_bytes()};
  absl::Status status;
  device->Fetch(FetchWork{.rows = LayerRows(&pool, spec)},
                [&](absl::Status ended) { status = std::move(ended); });
  EXPECT_EQ(status.message(), "cuda:0");
}

TEST_F(PlacedDeviceTest, WhatIsDeletedCountsNoMore) {
  Open(2);
  EXPECT_THAT(Place(4), ElementsAre(0, 1, 0, 1));
  Fill(*sequences[2]);
  sequences[0].reset();
  sequences[2].reset();
  EXPECT_THAT(Place(3), ElementsAre(0, 0, 0));
}

TEST_F(PlacedDeviceTest, DevicesWithoutMemoryOfTheirOwnTakeTurns) {
  Open(2);
  for (FakeDevice* fake : fakes) fake->own_memory.reset();
  EXPECT_THAT(Place(4), ElementsAre(0, 1, 0, 1));
  EXPECT_FALSE(device->memory().has_value());
}

TEST_F(PlacedDeviceTest, AnExhaustedDeviceIsPassedOver) {
  Open(3);
  fakes[0]->own_memory->used_bytes = 300;
  fakes[1]->own_memory->used_bytes = 100;
  fakes[2]->own_memory->used_bytes = 600;
  fakes[1]->sequence_status = absl::ResourceExhaustedError("cuda:1 is full");
  EXPECT_EQ(Place(), 0);
  fakes[0]->sequence_status = absl::ResourceExhaustedError("cuda:0 is full");
  EXPECT_EQ(Place(), 2);
  fakes[2]->sequence_status = absl::ResourceExhaustedError("cuda:2 is full");
  // The error is that of the device with most free memory.
  EXPECT_EQ(device->CreateSequence(*model).status(), fakes[1]->sequence_status);
  // Failed attempts do not count.
  for (FakeDevice* fake : fakes) fake->sequence_status = absl::OkStatus();
  EXPECT_EQ(Place(), 1);
}

TEST_F(PlacedDeviceTest, AnotherErrorIsAnsweredAtOnce) {
  Open(2);
  fakes[0]->sequence_status = absl::InternalError("broken");
  EXPECT_EQ(device->CreateSequence(*model).status(), fakes[0]->sequence_status);
  EXPECT_EQ(fakes[1]->sequence_attempts, 0);
}

TEST_F(PlacedDeviceTest, ManyThreadsCreateEvenly) {
  Open(4);
  std::mutex mutex;
  std::vector<std::thread> threads;
  threads.reserve(8);
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 16; ++i) {
        std::unique_ptr<DeviceSequence> sequence = Create();
        const std::lock_guard lock(mutex);
        sequences.push_back(std::move(sequence));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (FakeDevice* fake : fakes) EXPECT_EQ(fake->sequence_attempts, 32);
}

// ---- Sequences and models

TEST_F(PlacedDeviceTest, AForkStaysWithItsSource) {
  Open(2);
  EXPECT_THAT(Place(2), ElementsAre(0, 1));
  fakes[1]->own_memory->used_bytes = kLimit;
  std::unique_ptr<DeviceSequence> fork = *device->ForkSequence(*model, *sequences[1], 5);
  EXPECT_EQ(DeviceOf(*fork), 1);
  EXPECT_EQ(fakes[1]->fork_count, 1);
  EXPECT_EQ(fakes[0]->fork_count, 0);
  // The fork counts as a sequence, but as one that will take no memory of its own.
  fakes[1]->own_memory->used_bytes = 0;
  EXPECT_EQ(Place(), 0);
  EXPECT_EQ(Place(), 1);
  fork.reset();
  EXPECT_THAT(Place(2), ElementsAre(0, 1));
  fakes[1]->sequence_status = absl::ResourceExhaustedError("full");
  EXPECT_EQ(device->ForkSequence(*model, *sequences[1], 5).status(), fakes[1]->sequence_status);
  EXPECT_EQ(fakes[0]->fork_count, 0);
}

TEST_F(PlacedDeviceTest, CallsOfASequenceGoToItsDevice) {
  Open(2);
  EXPECT_THAT(Place(2), ElementsAre(0, 1));
  Fill(*sequences[1]);
  EXPECT_TRUE(device->PrepareAppend(*model, *sequences[1], 3, 10, 1).ok());
  device->TruncateSequence(*model, *sequences[1], 9);
  EXPECT_THAT(fakes[0]->prepared_layers, IsEmpty());
  EXPECT_THAT(fakes[0]->truncations, IsEmpty());
  EXPECT_THAT(fakes[1]->prepared_layers, ElementsAre(0, 3));
  EXPECT_THAT(fakes[1]->truncations, ElementsAre(9));
  EXPECT_EQ(sequences[1]->index_bytes(), 7);
}

TEST_F(PlacedDeviceTest, AModelIsOnEveryDeviceOrOnNone) {
  Open(3);
  EXPECT_EQ(model->bytes(), 300);
  EXPECT_EQ(device->WeightBytes(ModelSpec()), 63);
  for (FakeDevice* fake : fakes) EXPECT_EQ(fake->model_count, 1);
  fakes[1]->model_status = absl::ResourceExhaustedError("no room for weights");
  EXPECT_EQ(device->CreateModel(ModelSpec(), {}).status(), fakes[1]->model_status);
  for (FakeDevice* fake : fakes) EXPECT_EQ(fake->model_count, 1);
  model.reset();
  for (FakeDevice* fake : fakes) EXPECT_EQ(fake->model_count, 0);
}

TEST_F(PlacedDeviceTest, MemoryIsRegisteredOnce) {
  Open(3);
  std::vector<std::byte> memory(64);
  EXPECT_TRUE(device->RegisterMemory(memory).ok());
  device->UnregisterMemory(memory);
  EXPECT_EQ(fakes[0]->registered.size(), 1u);
  EXPECT_EQ(fakes[0]->unregistered.size(), 1u);
  for (const FakeDevice* fake : {fakes[1], fakes[2]}) {
    EXPECT_THAT(fake->registered, IsEmpty());
    EXPECT_THAT(fake->unregistered, IsEmpty());
  }
}

TEST_F(PlacedDeviceTest, ItTellsOfAllAndOfEach) {
  Open(2);
  fakes[0]->own_memory->used_bytes = 5;
  fakes[1]->own_memory->used_bytes = 6;
  EXPECT_EQ(device->info().name, "cuda:0+cuda:1");
  EXPECT_EQ(device->info().description, "fake cuda:0; fake cuda:1");
  EXPECT_EQ(device->info().thread_count, 2);
  EXPECT_EQ(device->memory()->limit_bytes, 2 * kLimit);
  EXPECT_EQ(device->memory()->used_bytes, 11);
  EXPECT_EQ(device->IndexBytesPerToken(ModelSpec()), 34);
  EXPECT_THAT(device->parts(), ElementsAre(fakes[0], fakes[1]));
}

TEST(PlacedDevice, OverOneIsThatOne) {
  auto fake = std::make_unique<FakeDevice>("cuda:0");
  const Device* const raw = fake.get();
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(std::move(fake));
  const std::unique_ptr<Device> device = CreatePlacedDevice(std::move(devices));
  EXPECT_EQ(device.get(), raw);
  EXPECT_THAT(device->parts(), ElementsAre(raw));
}

// ---- Jobs

TEST_F(PlacedDeviceTest, AJobOnOneDeviceIsForwardedAsItIs) {
  Open(2);
  EXPECT_THAT(Place(4), ElementsAre(0, 1, 0, 1));
  fakes[1]->job_items.clear();
  auto job = std::make_unique<Job>();
  Job* const raw = job.get();
  job->model = model.get();
  job->layer = 3;
  job->trace = true;
  job->items.push_back(Item(*sequences[3], 2));
  job->items.push_back(Item(*sequences[1], 5));
  const JobItem* const items = job->items.data();
  const std::thread::id caller = std::this_thread::get_id();
  int done_count = 0;
  device->Submit(std::move(job), [&](std::unique_ptr<Job> done) {
    ++done_count;
    EXPECT_EQ(std::this_thread::get_id(), caller);
    EXPECT_EQ(done.get(), raw);
    EXPECT_EQ(done->items.data(), items);
    EXPECT_EQ(done->model, model.get());
    EXPECT_EQ(done->items[0].sequence, sequences[3].get());
    EXPECT_EQ(done->items[1].sequence, sequences[1].get());
    EXPECT_TRUE(done->items[0].status.ok());
    EXPECT_THAT(std::string(done->items[1].status.message()), HasSubstr("item 5"));
    EXPECT_EQ(done->stages[0].name, "score");
  });
  EXPECT_EQ(done_count, 1);
  EXPECT_THAT(fakes[1]->job_items, ElementsAre(items));
}

TEST_F(PlacedDeviceTest, AJobWithoutItemsIsAnswered) {
  Open(2);
  auto job = std::make_unique<Job>();
  job->model = model.get();
  int done_count = 0;
  device->Submit(std::move(job), [&](std::unique_ptr<Job> done) {
    ++done_count;
    EXPECT_EQ(done->model, model.get());
  });
  EXPECT_EQ(done_count, 1);
}

TEST_F(PlacedDeviceTest, ASplitJobIsAnsweredOnceWhicheverPartEndsLast) {
  std::vector<int> order = {0, 1, 2};
  do {
    fakes.clear();
    sequences.clear();
    model.reset();
    Open(3);
    EXPECT_THAT(Place(6), ElementsAre(0, 1, 2, 0, 1, 2));
    for (size_t i = 0; i < fakes.size(); ++i) {
      fakes[i]->mode = FakeDevice::Mode::kHold;
      fakes[i]->job_time_us = 10.0 * static_cast<double>(i == 1 ? 9 : i + 1);
      fakes[i]->batch_item_count = i == 1 ? 8 : 3;
      fakes[i]->job_items.clear();
      fakes[i]->job_layers.clear();
      fakes[i]->job_cancels.clear();
    }
    const auto cancel = std::make_shared<CancelToken>();
    auto job = std::make_unique<Job>();
    Job* const raw = job.get();
    job->model = model.get();
    job->layer = 4;
    job->cancel = cancel;
    job->trace = true;
    const std::vector<int> places = {2, 0, 1, 5, 3, 4};  // indices of sequences
    for (size_t i = 0; i < places.size(); ++i) {
      job->items.push_back(Item(*sequences[places[i]], static_cast<int64_t>(i)));
    }
    std::vector<std::unique_ptr<Job>> answers;
    device->Submit(std::move(job),
                   [&](std::unique_ptr<Job> done) { answers.push_back(std::move(done)); });
    for (const int i : order) {
      EXPECT_THAT(answers, IsEmpty());
      fakes[i]->Release();
    }
    ASSERT_EQ(answers.size(), 1u);
    const Job& answer = *answers[0];
    EXPECT_EQ(&answer, raw);
    EXPECT_EQ(answer.model, model.get());
    EXPECT_EQ(answer.cancel, cancel);
    ASSERT_EQ(answer.items.size(), places.size());
    for (size_t i = 0; i < places.size(); ++i) {
      const JobItem& item = answer.items[i];
      EXPECT_EQ(item.sequence, sequences[places[i]].get());
      EXPECT_EQ(item.result.out[0], static_cast<float>(places[i] % 3));
      EXPECT_EQ(item.result.lse[0], static_cast<float>(i));
      EXPECT_EQ(item.status.message(), i % 2 == 0 ? "" : absl::StrCat("item ", i));
    }
    EXPECT_EQ(answer.device_time_us, 90);
    EXPECT_EQ(answer.queue_time_us, 18);
    EXPECT_EQ(answer.batch_item_count, 8);
    std::vector<std::string> stages;
    for (const StageTime& stage : answer.stages) {
      stages.push_back(absl::StrCat(stage.device, " ", stage.name));
    }
    EXPECT_THAT(stages, ElementsAre("cuda:0 score", "cuda:0 gather", "cuda:1 score",
                                    "cuda:1 gather", "cuda:2 score", "cuda:2 gather"));
    for (const FakeDevice* fake : fakes) {
      EXPECT_THAT(fake->job_layers, ElementsAre(4));
      EXPECT_THAT(fake->job_cancels, ElementsAre(cancel));
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(PlacedDeviceTest, PartsRunBesideEachOther) {
  Open(3);
  EXPECT_THAT(Place(3), ElementsAre(0, 1, 2));
  // The first part is held, the second ends within Submit, and the third device has no part.
  fakes[0]->mode = FakeDevice::Mode::kHold;
  fakes[2]->job_layers.clear();
  auto job = std::make_unique<Job>();
  job->model = model.get();
  job->items.push_back(Item(*sequences[1], 2));
  job->items.push_back(Item(*sequences[0], 4));
  int done_count = 0;
  device->Submit(std::move(job), [&](std::unique_ptr<Job> done) {
    ++done_count;
    EXPECT_THAT(done->stages, IsEmpty());
    EXPECT_EQ(done->items[0].result.out[0], 1);
    EXPECT_EQ(done->items[1].result.out[0], 0);
  });
  EXPECT_EQ(done_count, 0);
  fakes[0]->Release();
  EXPECT_EQ(done_count, 1);
  EXPECT_THAT(fakes[2]->job_layers, IsEmpty());
}

TEST_F(PlacedDeviceTest, ManySplitJobsAtOnce) {
  constexpr int kJobs = 64;
  constexpr int kThreads = 4;
  Open(3);
  const std::vector<int> places = Place(3 * kThreads);
  for (FakeDevice* fake : fakes) fake->mode = FakeDevice::Mode::kThread;
  std::vector<std::atomic<int>> done_counts(size_t{kThreads} * kJobs);
  std::atomic<int> wrong_count = 0;
  const auto check = [&](const Job& job, int index, int t) {
    ++done_counts[index];
    for (int i = 0; i < 3; ++i) {
      const JobItem& item = job.items[i];
      const int sequence = 3 * t + (index + i) % 3;
      if (item.sequence != sequences[sequence].get() ||
          item.result.out[0] != static_cast<float>(places[sequence]) ||
          item.status.ok() != (item.attend->query_count % 2 == 0)) {
        ++wrong_count;
      }
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int j = 0; j < kJobs; ++j) {
        const int index = t * kJobs + j;
        auto job = std::make_unique<Job>();
        job->model = model.get();
        for (int i = 0; i < 3; ++i) {
          job->items.push_back(Item(*sequences[3 * t + (index + i) % 3], index + i));
        }
        device->Submit(std::move(job),
                       [&, index, t](std::unique_ptr<Job> done) { check(*done, index, t); });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (FakeDevice* fake : fakes) fake->Join();
  EXPECT_EQ(wrong_count, 0);
  for (const std::atomic<int>& count : done_counts) EXPECT_EQ(count, 1);
}

}  // namespace
}  // namespace spillway

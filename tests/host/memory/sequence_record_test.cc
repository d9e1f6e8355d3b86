// Records in a file: what a killed process leaves for the next one.
#include "host/memory/sequence_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "host/base/limits.h"
#include "host/memory/model_record.h"
#include "host/memory/record_file.h"
#include "tests/host/memory/scratch_folder.h"

namespace spillway {
namespace {

using ::testing::HasSubstr;

// Simulates that the record's process is killed: nothing is given back, now or later.
void Kill(std::unique_ptr<SequenceRecord> record) {
  static auto* const killed = new std::vector<SequenceRecord*>;
  killed->push_back(record.release());
}

class RecordTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<RecordFile>> Open(uint64_t rows_number = 1) {
    const ArenaFolder folder = *ArenaFolder::Open(scratch.path());
    return RecordFile::Open(*ArenaFile::Open(folder, "records"), rows_number, &budget);
  }
  // A new file, ready to be written to.
  std::unique_ptr<RecordFile> OpenNew() {
    auto file = *Open();
    file->FreeUnclaimed();
    return file;
  }
  // The only sequence that the file lists.
  static absl::StatusOr<SequenceRecord::Opened> TheSequence(RecordFile& file) {
    const std::vector<RecordIndex> found = file.Find(RecordKind::kSequence);
    if (found.size() != 1) return absl::NotFoundError(std::to_string(found.size()));
    return SequenceRecord::Open(&file, found[0], kPageTokenCount);
  }

  ScratchFolder scratch;
  MemoryBudget budget{int64_t{1} << 30};
};

TEST_F(RecordTest, WhoObservesKnowsOfAllMemory) {
  auto file = OpenNew();
  std::vector<std::span<std::byte>> known;
  const RecordFile::Observer observer = {.mapped =
                                             [&](std::span<std::byte> memory) {
                                               known.push_back(memory);
                                               return absl::OkStatus();
                                             },
                                         .released =
                                             [&](std::span<std::byte> memory) {
                                               EXPECT_EQ(known.front().data(), memory.data());
                                               known.erase(known.begin());
                                             }};
  const auto knows = [&](const void* address) {
    return std::any_of(known.begin(), known.end(), [&](std::span<std::byte> memory) {
      return address >= memory.data() && address < memory.data() + memory.size();
    });
  };
  ASSERT_TRUE(file->Observe(observer).ok());
  std::vector<LayerRecord> layers;
  // More records than are mapped at first.
  for (int i = 0; i < 10'000; ++i) {
    layers.push_back(*LayerRecord::Create(file.get(), 1));
    ASSERT_TRUE(knows(layers.back().length_word())) << i;
  }
  EXPECT_GE(known.size(), 2);
  // The word is the layer's length.
  *layers[7'000].length_word() = 77;
  EXPECT_EQ(layers[7'000].token_count(), 77);
  EXPECT_EQ(layers[7'001].token_count(), 0);
  ASSERT_TRUE(file->Observe({}).ok());
  EXPECT_TRUE(known.empty());
}

TEST_F(RecordTest, AFileThatADeviceDoesNotTakeGrowsNoFurther) {
  auto file = OpenNew();
  int64_t calls = 0;
  ASSERT_TRUE(file->Observe({.mapped =
                                 [&](std::span<std::byte>) {
                                   return ++calls == 2 ? absl::ResourceExhaustedError("pinned")
                                                       : absl::OkStatus();
                                 },
                             .released = [](std::span<std::byte>) {}})
                  .ok());
  absl::Status status;
  int64_t count = 0;
  for (; count < 10'000 && status.ok(); ++count) status = file->Allocate().status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(calls, 2);
  // Another attempt is possible.
  EXPECT_TRUE(file->Allocate().ok());
  EXPECT_EQ(calls, 3);
}

TEST_F(RecordTest, AFileKeepsItsIdentity) {
  const std::string identity = (*Open())->identity();
  EXPECT_EQ(identity.size(), 24u);
  EXPECT_EQ((*Open())->identity(), identity);
  const absl::Status other = Open(2).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(other)) << other;
  EXPECT_THAT(std::string(other.message()), HasSubstr("does not belong to the file of rows"));
}

TEST_F(RecordTest, RefusesAFileOfSomethingElse) {
  (void)*Open();
  {
    std::fstream file(scratch.File("records"), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(8);
    file.write("\xFF\xFF\xFF\xFF", 4);  // the first word of the header is at 8
  }
  EXPECT_TRUE(absl::IsFailedPrecondition(Open().status())) << Open().status();
}

TEST_F(RecordTest, AListedSequenceIsFoundAsItWasAndAnUnlistedOneIsNot) {
  const std::string text(1300, 'x');
  {
    auto file = OpenNew();
    auto kept = *SequenceRecord::Create(file.get(), text, 3, 2);
    // More pages than one record has room for.
    for (int layer = 0; layer < 3; ++layer) {
      ASSERT_TRUE(kept->layer(layer).Reserve(200).ok());
      for (int64_t page = 0; page < 200; ++page) {
        for (int head = 0; head < 2; ++head) {
          kept->layer(layer).SetPageIndex(head, page,
                                          static_cast<uint32_t>(layer * 1000 + page * 2 + head));
        }
      }
      kept->layer(layer).SetTokenCount(200 * kPageTokenCount - layer);
    }
    kept->BeginCut(200 * kPageTokenCount, 7);
    kept->EndCut();
    kept->List();
    auto never = *SequenceRecord::Create(file.get(), "never listed", 3, 2);
    auto gone = *SequenceRecord::Create(file.get(), "gone", 3, 2);
    gone->List();
    gone->Unlist();
    // Both are killed, so nothing is given back.
    Kill(std::move(never));
    Kill(std::move(gone));
  }
  auto file = *Open();
  auto found = TheSequence(*file);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->description, text);
  SequenceRecord& record = *found->record;
  EXPECT_EQ(record.generation(), 7);
  EXPECT_EQ(record.kv_head_count(), 2);
  ASSERT_EQ(record.layer_count(), 3);
  for (int layer = 0; layer < 3; ++layer) {
    EXPECT_EQ(record.layer(layer).token_count(), 200 * kPageTokenCount - layer);
    for (int64_t page = 0; page < 200; ++page) {
      for (int head = 0; head < 2; ++head) {
        EXPECT_EQ(record.layer(layer).PageIndex(head, page),
                  static_cast<uint32_t>(layer * 1000 + page * 2 + head));
      }
    }
  }
  // The records of the others are free, and using them changes nothing here.
  file->FreeUnclaimed();
  for (int i = 0; i < 3000; ++i) {
    std::memset(file->At(*file->Allocate()).payload, 0xFF, sizeof(Record::payload));
  }
  EXPECT_EQ(record.layer(2).PageIndex(1, 199), 2399u);
}

TEST_F(RecordTest, AMarkStaysAndWhatMemoryHeldIsNone) {
  {
    auto file = OpenNew();
    // As if others had written where its records will be.
    std::vector<RecordIndex> used;
    for (int i = 0; i < 8; ++i) {
      used.push_back(*file->Allocate());
      std::memset(file->At(used.back()).payload, 0xFF, sizeof(Record::payload));
    }
    for (const RecordIndex index : used) file->Free(index);
    auto record = *SequenceRecord::Create(file.get(), "s", 1, 1);
    EXPECT_FALSE(record->marked());
    record->List();
    Kill(std::move(record));
  }
  {
    auto file = *Open();
    auto found = TheSequence(*file);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_FALSE(found->record->marked());
    found->record->Mark();
    EXPECT_TRUE(found->record->marked());
    Kill(std::move(found->record));
  }
  auto file = *Open();
  auto found = TheSequence(*file);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_TRUE(found->record->marked());
  // Earlier versions left there what the memory had held before.
  RecordIndex root = file->Find(RecordKind::kSequence)[0];
  for (const unsigned char left : {0x00, 0x20, 0xFF}) {
    constexpr size_t kMarkOffset = 20;
    std::memset(file->At(root).payload + kMarkOffset, left, sizeof(uint32_t));
    EXPECT_FALSE(found->record->marked()) << int{left};
  }
}

TEST_F(RecordTest, ACutIsOfAllLayersAtOnce) {
  {
    auto file = OpenNew();
    auto record = *SequenceRecord::Create(file.get(), "s", 3, 1);
    for (int layer = 0; layer < 3; ++layer) {
      ASSERT_TRUE(record->layer(layer).Reserve(1).ok());
      record->layer(layer).SetTokenCount(100 + layer);
    }
    record->List();
    // Killed after one layer was cut. Another layer is shorter than the cut.
    record->layer(2).SetTokenCount(30);
    record->BeginCut(40, 1);
    record->layer(0).SetTokenCount(40);
    Kill(std::move(record));
  }
  auto file = *Open();
  auto found = TheSequence(*file);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->record->generation(), 1);
  EXPECT_EQ(found->record->layer(0).token_count(), 40);
  EXPECT_EQ(found->record->layer(1).token_count(), 40);
  EXPECT_EQ(found->record->layer(2).token_count(), 30);
}

TEST_F(RecordTest, MemoryOfWhatGoesIsUsedAgain) {
  auto file = OpenNew();
  std::optional<int64_t> used;
  for (int i = 0; i < 200; ++i) {
    auto record = *SequenceRecord::Create(file.get(), std::string(2000, 'y'), 32, 8);
    for (int layer = 0; layer < 32; ++layer) ASSERT_TRUE(record->layer(layer).Reserve(100).ok());
    record->List();
    record->Unlist();
    record.reset();
    if (!used) used = budget.used_bytes();
    EXPECT_EQ(budget.used_bytes(), *used);
  }
}

TEST_F(RecordTest, RefusesWhatTheBudgetDoesNotHave) {
  MemoryBudget small(int64_t{3} << 20);  // the file grows by 2 MiB at a time
  const ArenaFolder folder = *ArenaFolder::Open(scratch.path());
  auto file = *RecordFile::Open(*ArenaFile::Open(folder, "records"), 1, &small);
  file->FreeUnclaimed();
  std::vector<std::unique_ptr<SequenceRecord>> records;
  absl::Status status;
  while (status.ok()) {
    auto record = SequenceRecord::Create(file.get(), "s", 100, 1);
    status = record.status();
    if (record.ok()) records.push_back(*std::move(record));
  }
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  // There are 4,095 records, and each sequence takes 102.
  EXPECT_EQ(records.size(), 40u);
  records.pop_back();
  EXPECT_TRUE(SequenceRecord::Create(file.get(), "s", 100, 1).ok());
}

TEST_F(RecordTest, AModelHasItsWeightsOrNone) {
  const std::string weights(70'001, 'w');
  {
    auto file = OpenNew();
    auto with = *ModelRecord::Create(file.get(), "with");
    with->List();
    ASSERT_TRUE(with->SetWeights(weights).ok());
    auto without = *ModelRecord::Create(file.get(), "without");
    without->List();
  }
  auto file = *Open();
  std::vector<std::pair<std::string, std::string>> found;
  for (const RecordIndex root : file->Find(RecordKind::kModel)) {
    auto opened = ModelRecord::Open(file.get(), root);
    ASSERT_TRUE(opened.ok()) << opened.status();
    found.emplace_back(opened->description, opened->weights);
  }
  EXPECT_THAT(found,
              ::testing::UnorderedElementsAre(std::pair<std::string, std::string>("with", weights),
                                              std::pair<std::string, std::string>("without", "")));
}

// Whatever the file holds, opening it ends with an error or with something that can be used.
TEST_F(RecordTest, DamageIsRefusedOrHarmless) {
  std::vector<std::byte> good;
  {
    auto file = OpenNew();
    for (int i = 0; i < 3; ++i) {
      auto record = *SequenceRecord::Create(file.get(), std::string(600, 'a'), 4, 2);
      for (int layer = 0; layer < 4; ++layer) {
        ASSERT_TRUE(record->layer(layer).Reserve(150).ok());
        record->layer(layer).SetTokenCount(150 * kPageTokenCount);
      }
      record->List();
    }
    auto model = *ModelRecord::Create(file.get(), std::string(900, 'b'));
    ASSERT_TRUE(model->SetWeights(std::string(3000, 'w')).ok());
    model->List();
    good.resize(64 * Record::kBytes);
    for (size_t i = 0; i < 64; ++i) {
      std::memcpy(
          &good[i * Record::kBytes],
          reinterpret_cast<std::byte*>(&file->At(1)) +
              (static_cast<std::ptrdiff_t>(i) - 1) * static_cast<std::ptrdiff_t>(Record::kBytes),
          Record::kBytes);
    }
  }
  std::mt19937 random(5);
  int lost = 0, found = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    std::vector<std::byte> bad = good;
    const int changes = 1 + static_cast<int>(random() % 8);
    for (int i = 0; i < changes; ++i) {
      // After the file's header, and mostly near the beginning of a record.
      const size_t record = 1 + random() % 63;
      const size_t at = record * Record::kBytes + random() % (random() % 4 == 0 ? 512 : 56);
      bad[at] = static_cast<std::byte>(random());
    }
    {
      std::fstream file(scratch.File("records"), std::ios::in | std::ios::out | std::ios::binary);
      file.write(reinterpret_cast<const char*>(bad.data()),
                 static_cast<std::streamsize>(bad.size()));
    }
    auto file = *Open();
    std::vector<std::unique_ptr<SequenceRecord>> kept;
    for (const RecordIndex root : file->Find(RecordKind::kModel)) {
      (ModelRecord::Open(file.get(), root).ok() ? found : lost) += 1;
    }
    for (const RecordIndex root : file->Find(RecordKind::kSequence)) {
      auto opened = SequenceRecord::Open(file.get(), root, kPageTokenCount);
      (opened.ok() ? found : lost) += 1;
      if (opened.ok()) kept.push_back(std::move(opened->record));
    }
    file->FreeUnclaimed();
    for (const auto& record : kept) {
      for (int layer = 0; layer < record->layer_count(); ++layer) {
        const int64_t count = record->layer(layer).token_count();
        ASSERT_GE(count, 0);
        ASSERT_LE(count, kTokenCountMax);
        if (count > 0)
          (void)record->layer(layer).PageIndex(record->kv_head_count() - 1,
                                               (count - 1) / kPageTokenCount);
      }
      record->Unlist();
    }
  }
  EXPECT_GT(lost, 500);
  EXPECT_GT(found, 500);
}

}  // namespace
}  // namespace spillway

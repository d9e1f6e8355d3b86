// Records in a file: what a killed process leaves for the next one.
#include "host/memory/sequence_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <optional>
#include <random>
#include <set>
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
  *layers[7'000].length_word() = LayerRecord::LengthWord(77);
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

TEST_F(RecordTest, RefusesAFileOfAnotherVersion) {
  (void)*Open();
  {
    std::fstream file(scratch.File("records"), std::ios::in | std::ios::out | std::ios::binary);
    file.write("SPILLWAY\1\0\0\0\0\2\0\0", 16);  // as version 1 began
    file.write(std::string(496, '\0').data(), 496);
  }
  const absl::Status status = Open().status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("has version 1, but"));
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
      kept->layer(layer).SetTokenCount(200 * kPageTokenCount - layer, 5);
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
}

TEST_F(RecordTest, ACutIsOfAllLayersAtOnce) {
  {
    auto file = OpenNew();
    auto record = *SequenceRecord::Create(file.get(), "s", 3, 1);
    for (int layer = 0; layer < 3; ++layer) {
      ASSERT_TRUE(record->layer(layer).Reserve(1).ok());
      record->layer(layer).SetTokenCount(100 + layer, 0);
    }
    record->List();
    // Killed after one layer was cut. Another layer is shorter than the cut.
    record->layer(2).SetTokenCount(30, 0);
    record->BeginCut(40, 1);
    record->layer(0).SetTokenCount(40, 0);
    Kill(std::move(record));
  }
  auto file = *Open();
  auto found = TheSequence(*file);
  ASSERT_TRUE(found.ok()) << found.status();
  const std::optional<SequenceRecord::Cut> cut = found->record->begun_cut();
  ASSERT_TRUE(cut.has_value());
  EXPECT_EQ(cut->token_count, 40);
  EXPECT_EQ(cut->generation, 1);
  EXPECT_EQ(found->record->generation(), 0);
  EXPECT_EQ(found->record->layer(0).token_count(), 40);
  EXPECT_EQ(found->record->layer(1).token_count(), 101);
  EXPECT_EQ(found->record->layer(2).token_count(), 30);
  found->record->EndCut();
  EXPECT_EQ(found->record->generation(), 1);
  EXPECT_FALSE(found->record->begun_cut().has_value());
}

// Reads the summed rows after each store of a write, as if the process had been killed there.
TEST_F(RecordTest, TheSumIsOfTheLengthAtAnyMoment) {
  auto file = OpenNew();
  LayerRecord record = *LayerRecord::Create(file.get(), 1);
  const auto expect = [&](int64_t token_count, uint64_t sum) {
    const std::optional<LayerRecord::Summed> summed = record.summed();
    ASSERT_TRUE(summed.has_value());
    EXPECT_EQ(summed->token_count, token_count);
    EXPECT_EQ(summed->open_sum, sum);
  };
  expect(0, 0);
  record.SetTokenCount(5, 50);
  record.SetTokenCount(9, 90);
  expect(9, 90);
  // Cut, and other rows after the cut: the sum for 9 tokens is out of date.
  record.SetTokenCount(7, 70);
  expect(7, 70);
  *record.length_word() = LayerRecord::LengthWord(9);  // by a device
  expect(7, 70);
  record.SetSummed(8, 80);
  expect(8, 80);
  EXPECT_EQ(record.token_count(), 9);
  record.SetSummed(9, 91);
  expect(9, 91);
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

TEST_F(RecordTest, NoIndexInUseIsHandedOutAgain) {
  std::set<RecordIndex> used;
  RecordIndex kept = 0;
  {
    auto file = OpenNew();
    const auto take = [&](int count) {
      for (int i = 0; i < count; ++i) {
        const RecordIndex index = *file->Allocate();
        EXPECT_NE(index, 0u);
        EXPECT_TRUE(used.insert(index).second) << index;
      }
    };
    // More than the file has before it grows.
    take(10'000);
    for (const RecordIndex freed : {7u, 5'000u, 9'999u}) {
      file->Free(freed);
      used.erase(freed);
    }
    take(4);
    auto record = *SequenceRecord::Create(file.get(), "s", 1, 1);
    kept = record->layer(0).first();
    EXPECT_FALSE(used.contains(kept));
    record->List();
    Kill(std::move(record));
  }
  // The next process may use all but those of the sequence.
  auto file = *Open();
  auto found = TheSequence(*file);
  ASSERT_TRUE(found.ok()) << found.status();
  file->FreeUnclaimed();
  used = {kept};
  for (int i = 0; i < 10'000; ++i) {
    const RecordIndex index = *file->Allocate();
    EXPECT_TRUE(used.insert(index).second) << index;
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

// A file with two models and two sequences, each sequence with pages in several records.
class DamageTest : public RecordTest {
 protected:
  static constexpr int kLayers = 2, kHeads = 2, kPages = 40;
  static constexpr size_t kUsed = 32;  // records, with some that are free
  static constexpr size_t kHeaderBytes = 56;

  DamageTest() {
    {
      auto file = OpenNew();
      for (const char* name : {"a", "b"}) {
        auto record = *SequenceRecord::Create(file.get(), Text(name), kLayers, kHeads);
        for (int layer = 0; layer < kLayers; ++layer) {
          LayerRecord& rows = record->layer(layer);
          EXPECT_TRUE(rows.Reserve(kPages).ok());
          for (int page = 0; page < kPages; ++page) {
            for (int head = 0; head < kHeads; ++head) {
              rows.SetPageIndex(head, page, Index(layer, page, head));
              rows.SetPageSum(head, page, Index(layer, page, head) * 3);
            }
          }
          rows.SetTokenCount(kPages * kPageTokenCount - 1, 99);
        }
        record->List();
        auto model = *ModelRecord::Create(file.get(), Text(name) + " model");
        EXPECT_TRUE(model->SetWeights(std::string(900, 'w')).ok());
        model->List();
        Kill(std::move(record));
      }
      identity = file->identity();
    }
    std::ifstream file(scratch.File("records"), std::ios::binary);
    good.resize(kUsed * Record::kBytes);
    file.read(good.data(), static_cast<std::streamsize>(good.size()));
  }

  static std::string Text(const std::string& name) { return name + std::string(700, '.'); }
  static uint32_t Index(int layer, int page, int head) {
    return static_cast<uint32_t>(1000 * layer + 10 * page + head);
  }
  void Write(const std::string& bytes) const {
    std::fstream file(scratch.File("records"), std::ios::in | std::ios::out | std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }

  // What a process finds: how many of the four are whole, how many are lost with an error, and how
  // many sequences have a damaged page or sum, which is found when the rows are read.
  struct Found {
    int whole = 0, errors = 0, damaged_pages = 0, unknown = 0;
  };
  Found Read(const std::string& bytes) {
    Write(bytes);
    Found found;
    auto opened_file = Open();
    EXPECT_TRUE(opened_file.ok()) << opened_file.status();
    if (!opened_file.ok()) return found;
    RecordFile& file = **opened_file;
    EXPECT_EQ(file.identity(), identity);
    for (const RecordIndex root : file.Find(RecordKind::kModel)) {
      const auto opened = ModelRecord::Open(&file, root);
      if (!opened.ok()) {
        ++found.errors;
        continue;
      }
      EXPECT_TRUE(opened->description == Text("a") + " model" ||
                  opened->description == Text("b") + " model");
      EXPECT_EQ(opened->weights, std::string(900, 'w'));
      ++found.whole;
    }
    for (const RecordIndex root : file.Find(RecordKind::kSequence)) {
      auto opened = SequenceRecord::Open(&file, root, kPageTokenCount);
      if (!opened.ok()) {
        EXPECT_THAT(std::string(opened.status().message()), HasSubstr("records"));
        ++found.errors;
        continue;
      }
      EXPECT_TRUE(opened->description == Text("a") || opened->description == Text("b"));
      bool whole = true;
      for (int layer = 0; layer < kLayers; ++layer) {
        const LayerRecord& rows = opened->record->layer(layer);
        EXPECT_EQ(rows.token_count(), kPages * kPageTokenCount - 1);
        whole &= rows.summed().has_value() && rows.summed()->open_sum == 99;
        const int64_t tokens = rows.ReadableTokenCount(kPageTokenCount);
        const int64_t pages = (tokens + kPageTokenCount - 1) / kPageTokenCount;
        whole &= tokens == rows.token_count();
        for (int page = 0; page < pages; ++page) {
          for (int head = 0; head < kHeads; ++head) {
            EXPECT_EQ(rows.PageIndex(head, page), Index(layer, page, head));
            whole &= rows.PageSum(head, page) == uint64_t{Index(layer, page, head)} * 3;
          }
        }
      }
      ++(whole ? found.whole : found.damaged_pages);
      Kill(std::move(opened->record));
    }
    found.unknown = static_cast<int>(file.FindDamaged().size());
    return found;
  }

  std::string good, identity;
};

TEST_F(DamageTest, OneBitLosesOneRecordAndIsNoticed) {
  ASSERT_EQ(Read(good).whole, 4);
  int lost = 0, harmless = 0;
  // Every byte near the beginning of a record, and some of the others.
  for (size_t at = 0; at < good.size(); at += at % Record::kBytes < 64 ? 1 : 29) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 1 << at % 8);
    const Found found = Read(bad);
    EXPECT_GE(found.whole, 3) << "byte " << at;
    const int noticed = found.errors + found.damaged_pages + found.unknown;
    if (found.whole < 4) {
      EXPECT_GE(noticed, 1) << "byte " << at;
    }
    ++(found.whole < 4 ? lost : harmless);
  }
  EXPECT_GT(lost, 300);
  EXPECT_GT(harmless, 300);
}

TEST_F(DamageTest, MuchDamageIsRefusedOrHarmless) {
  std::mt19937 random(5);
  int lost = 0, whole = 0;
  for (int trial = 0; trial < 400; ++trial) {
    std::string bad = good;
    for (unsigned i = 1 + random() % 8; i > 0; --i) {
      // After the file's header, and mostly near the beginning of a record.
      const size_t record = 1 + random() % (kUsed - 1);
      bad[record * Record::kBytes + random() % (random() % 4 == 0 ? 512 : 80)] =
          static_cast<char>(random());
    }
    const Found found = Read(bad);
    whole += found.whole;
    lost += 4 - found.whole;
  }
  EXPECT_GT(lost, 200);
  EXPECT_GT(whole, 200);
}

TEST_F(DamageTest, BothHeadersAreDamaged) {
  std::string bad = good;
  bad[20] = static_cast<char>(bad[20] ^ 1);
  EXPECT_EQ(Read(bad).whole, 4);  // and the first header is written again
  {
    std::ifstream file(scratch.File("records"), std::ios::binary);
    std::string header(Record::kBytes, '\0');
    file.read(header.data(), static_cast<std::streamsize>(header.size()));
    EXPECT_EQ(header, good.substr(0, Record::kBytes));
  }
  bad[20 + kHeaderBytes] = static_cast<char>(bad[20 + kHeaderBytes] ^ 1);
  Write(bad);
  const absl::Status status = Open().status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("its header is damaged"));
}

}  // namespace
}  // namespace spillway

#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "engine/errors.h"
#include "engine/sha256.h"
#include "engine/snapshot/description.h"
#include "engine/snapshot/folder.h"
#include "engine/snapshot/folder_charge.h"
#include "engine/snapshot/load.h"
#include "engine/snapshot/manifest.h"
#include "engine/snapshot/remove.h"
#include "engine/snapshot/save.h"
#include "gmock/gmock.h"
#include "host/memory/arena.h"
#include "host/memory/page_pool.h"

namespace spillway {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr int64_t kTokensPerFile = 256;  // 8 MiB per layer, at 32 KiB per token

std::string Read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void Write(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

std::string Flipped(std::string bytes, size_t at) {
  bytes.at(at) = static_cast<char>(bytes.at(at) ^ 1);
  return bytes;
}

// Reports that it is cancelled after `count` checks.
class CancelAfter final : public CancelToken {
 public:
  explicit CancelAfter(int count) : left_(count) {}
  bool cancelled() const override { return left_-- <= 0; }

 private:
  mutable int left_;
};

// A model with two layers, 16 KV heads of 256 dimensions, f32.
class SnapshotTest : public ::testing::Test {
 protected:
  SnapshotTest() {
    root_ = fs::path(::testing::TempDir()) / absl::StrCat("snapshots-", getpid());
    fs::remove_all(root_);
    ArenaOptions options;
    options.limit_bytes = int64_t{128} << 20;
    options.extent_bytes = kSlabBytes;
    options.touch_thread_count = 1;
    arena_ = *Arena::Create(options, &budget_);
    spec_.layer_count = 2;
    spec_.query_head_count = spec_.kv_head_count = 16;
    spec_.head_dim = 256;
    spec_.dtype = DType::kF32;
    EXPECT_TRUE(Normalize(spec_).empty());
    pool_.emplace(arena_.get(), kPageTokenCount * spec_.row_bytes());
    for (int l = 0; l < spec_.layer_count; ++l) rows_.emplace_back(&*pool_, spec_);
  }
  ~SnapshotTest() override { fs::remove_all(root_); }

  // The value of all elements of a row. It depends on K or V, layer, head and token.
  static float Value(int half, int layer, int head, int64_t token, float tag) {
    return tag + static_cast<float>(half * 8 + layer * 4 + head % 4) +
           static_cast<float>(token) * 16;
  }
  void Append(int64_t count, float tag = 0) {
    for (int l = 0; l < spec_.layer_count; ++l) {
      LayerRows& layer = rows_[l];
      const int64_t start = layer.token_count();
      ASSERT_TRUE(layer.PrepareAppend(count).ok());
      std::vector<float> k(count * 256), v(count * 256);
      for (int head = 0; head < spec_.kv_head_count; ++head) {
        for (int64_t i = 0; i < count * 256; ++i) {
          k[i] = Value(0, l, head, start + i / 256, tag);
          v[i] = Value(1, l, head, start + i / 256, tag);
        }
        const auto source = [](const std::vector<float>& rows) {
          return RowSource{reinterpret_cast<const std::byte*>(rows.data()), 0, 1024};
        };
        layer.WriteRows(head, start, 0, count, source(k), source(v));
      }
      layer.Commit(start + count);
    }
  }
  Manifest Described() const {
    Manifest manifest;
    manifest.model_json = DescribeModel("models/m", spec_);
    manifest.model_message = std::string("\0\xFF model", 8);
    manifest.sequence_message = "sequence";
    manifest.token_count = rows_[0].token_count();
    return manifest;
  }
  absl::StatusOr<SavedSnapshot> Save(const CancelToken& cancel = CancelToken(),
                                     const std::string& client_data = "") {
    absl::StatusOr<SnapshotFolder> folder = SnapshotFolder::OpenToSave(root_, "chat");
    if (!folder.ok()) return folder.status();
    return SaveSnapshot(*folder, spec_, rows_, Described(),
                        std::as_bytes(std::span(client_data.data(), client_data.size())), budget_,
                        cancel);
  }
  // Loads the snapshot and compares its rows with those in memory.
  absl::Status Load(const CancelToken& cancel = CancelToken()) {
    absl::StatusOr<SnapshotFolder> folder = SnapshotFolder::OpenToLoad(root_, "chat");
    if (!folder.ok()) return folder.status();
    absl::StatusOr<Manifest> manifest = ReadManifest(*folder, budget_);
    if (!manifest.ok()) return manifest.status();
    if (absl::Status status = CheckFits(*manifest, spec_); !status.ok()) return status;
    if (auto data = ReadClientData(*folder, *manifest); !data.ok()) return data.status();
    std::vector<int64_t> counts(2);
    bool equal = true;
    absl::Status status =
        ReadRows(*folder, spec_, *manifest, budget_, cancel, [&](const Chunk& chunk) {
          for (int l = 0; l < chunk.layer_count; ++l) {
            int64_t& count = counts[chunk.layer_start + l];
            EXPECT_EQ(chunk.start, count);
            equal = equal && rows_[chunk.layer_start + l].Equals(
                                 chunk.start, chunk.count, chunk.k.Layer(l), chunk.v.Layer(l));
            count += chunk.count;
          }
          return absl::OkStatus();
        });
    if (status.ok()) {
      EXPECT_TRUE(equal);
      EXPECT_EQ(counts[0], rows_[0].token_count());
      EXPECT_EQ(counts[1], rows_[0].token_count());
    }
    return status;
  }
  fs::path Folder() const { return root_ / "chat"; }
  std::set<std::string> Names() const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(Folder())) {
      names.insert(entry.path().filename());
    }
    return names;
  }
  // Replaces `old` by `with` in the manifest, and updates its digest.
  void Forge(const std::string& old, const std::string& with) {
    std::string text = Read(Folder() / kManifestName);
    ASSERT_THAT(text, HasSubstr(old));
    text = absl::StrReplaceAll(text, {{old, with}});
    const size_t tail = text.rfind(",\n  \"sha256\": \"");
    text.resize(tail);
    Write(Folder() / kManifestName,
          absl::StrCat(text, ",\n  \"sha256\": \"", Sha256::Of(text), "\"\n}\n"));
  }

  fs::path root_;
  MemoryBudget budget_{int64_t{256} << 20, int64_t{64} << 20};
  std::unique_ptr<Arena> arena_;
  ModelSpec spec_;
  std::optional<PagePool> pool_;
  std::vector<LayerRows> rows_;
};

TEST_F(SnapshotTest, LayoutBoundsFilesAndLayers) {
  EXPECT_EQ(SnapshotLayout::TokensPerFile(spec_), kTokensPerFile);
  ModelSpec wide = spec_;
  wide.layer_count = 1024;  // 32 MiB per token
  EXPECT_EQ(SnapshotLayout::TokensPerFile(wide), 2);
  wide.kv_head_count = wide.query_head_count = 1024;  // 2 GiB per token
  EXPECT_EQ(SnapshotLayout::TokensPerFile(wide), 1);
  const SnapshotLayout layout(spec_);
  EXPECT_EQ(layout.FileCount(0), 0);
  EXPECT_EQ(layout.FileCount(256), 1);
  EXPECT_EQ(layout.FileCount(257), 2);
  EXPECT_EQ(layout.Run(1, 257).start, 256);
  EXPECT_EQ(layout.Run(1, 257).end, 257);
  const std::string name = SnapshotLayout::FileName({0, 256}, Sha256::Of(std::string("abc")));
  EXPECT_EQ(name, "rows-0000000000-0000000256-ba7816bf8f01cfea.safetensors");
  EXPECT_TRUE(IsDataFileName(name));
  EXPECT_TRUE(IsDataFileName("client-ba7816bf8f01cfea.bin"));
  for (const char* other :
       {"", "manifest.json", "rows-", "rows-0000000000-0000000256-ba7816bf8f01cfe.safetensors",
        "rows-0000000000-0000000256-ba7816bf8f01cfeA.safetensors", "client-.bin",
        "rows-000000000a-0000000256-ba7816bf8f01cfea.safetensors", "my-rows.safetensors"}) {
    EXPECT_FALSE(IsDataFileName(other)) << other;
  }
}

TEST_F(SnapshotTest, HeadersAreSafetensors) {
  spec_.dtype = DType::kBF16;
  const std::string header = SnapshotLayout(spec_).Header({256, 259});
  ASSERT_EQ(header.size() % 8, 0u);
  uint64_t length = 0;
  std::memcpy(&length, header.data(), 8);
  ASSERT_EQ(length, header.size() - 8);
  const auto json = nlohmann::json::parse(header.substr(8));
  EXPECT_EQ(json.size(), 5u);
  EXPECT_EQ(json["__metadata__"]["token_start"], "256");
  EXPECT_EQ(json["layers.1.v"].dump(),
            "{\"data_offsets\":[73728,98304],\"dtype\":\"BF16\",\"shape\":[16,3,256]}");
}

TEST_F(SnapshotTest, EmptySequencesToo) {
  ASSERT_TRUE(Save().ok());
  EXPECT_EQ(Names(), std::set<std::string>{kManifestName});
  EXPECT_TRUE(Load().ok());
}

TEST_F(SnapshotTest, SavedAgainWritesWhatIsNew) {
  Append(300);
  const absl::StatusOr<SavedSnapshot> first = Save();
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->written_byte_count, first->byte_count);
  EXPECT_TRUE(Load().ok());
  EXPECT_EQ(Save()->written_byte_count, 0);
  Append(10);
  const SavedSnapshot grown = *Save();
  const SnapshotLayout layout(spec_);
  EXPECT_EQ(grown.written_byte_count, layout.FileBytes({256, 310}));
  EXPECT_EQ(grown.byte_count, layout.FileBytes({0, 256}) + grown.written_byte_count);
  // The file of tokens [256, 300) was removed.
  EXPECT_EQ(Names().size(), 3u);
  EXPECT_TRUE(Load().ok());
  // Other rows at the same positions.
  for (LayerRows& layer : rows_) layer.Truncate(100);
  Append(210, 0.5f);
  EXPECT_EQ(Save()->written_byte_count, grown.byte_count);
  EXPECT_TRUE(Load().ok());
  EXPECT_EQ(Names().size(), 3u);
}

TEST_F(SnapshotTest, DamagedFilesAreWrittenAnew) {
  Append(300);
  ASSERT_TRUE(Save().ok());
  for (const std::string& name : Names()) {
    if (name == kManifestName) continue;
    const std::string whole = Read(Folder() / name);
    Write(Folder() / name, Flipped(whole, whole.size() / 2));
    EXPECT_EQ(Save()->written_byte_count, static_cast<int64_t>(whole.size()));
    EXPECT_EQ(Read(Folder() / name), whole);
  }
}

TEST_F(SnapshotTest, ASaveThatIsCutOffLeavesWhatWasAndGoesOn) {
  Append(300);
  ASSERT_TRUE(Save().ok());
  const std::string before = Read(Folder() / kManifestName);
  for (LayerRows& layer : rows_) layer.Truncate(0);
  Append(600, 0.25f);  // three files with two checks each, and one check at the end
  for (int looks = 0; looks < 7; ++looks) {
    EXPECT_TRUE(absl::IsCancelled(Save(CancelAfter(looks)).status())) << looks;
    ASSERT_EQ(Read(Folder() / kManifestName), before);
  }
  // Every complete file was kept.
  EXPECT_EQ(Save()->written_byte_count, 0);
  EXPECT_TRUE(Load().ok());
  EXPECT_EQ(Names().size(), 4u);
}

TEST_F(SnapshotTest, EveryWrongByteIsFound) {
  Append(40);
  ASSERT_TRUE(Save(CancelToken(), "what a client gave").ok());
  for (const std::string& name : Names()) {
    const std::string whole = Read(Folder() / name);
    const size_t size = whole.size();
    // Places in lengths, header and rows; in the manifest and in small files, every byte.
    std::set<size_t> places = {0, 1, 7, 8, 9, 100, size / 3, size / 2, size - 2, size - 1};
    for (size_t i = 0; size < 4096 && i < size; ++i) places.insert(i);
    for (const size_t at : places) {
      if (at >= size) continue;
      Write(Folder() / name, Flipped(whole, at));
      const absl::Status status = Load();
      EXPECT_TRUE(absl::IsDataLoss(status)) << name << " at " << at << ": " << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(name));
    }
    for (const size_t length : std::set<size_t>{0, 1, 7, 8, size / 2, size - 1}) {
      if (length >= size) continue;
      Write(Folder() / name, whole.substr(0, length));
      const absl::Status status = Load();
      EXPECT_TRUE(absl::IsDataLoss(status)) << name << " cut to " << length << ": " << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(name));
    }
    Write(Folder() / name, whole + "x");
    EXPECT_TRUE(absl::IsDataLoss(Load())) << name;
    fs::remove(Folder() / name);
    const absl::Status status = Load();
    EXPECT_EQ(status.code(),
              name == kManifestName ? absl::StatusCode::kNotFound : absl::StatusCode::kDataLoss);
    Write(Folder() / name, whole);
  }
  EXPECT_TRUE(Load().ok());
}

TEST_F(SnapshotTest, HostileManifestsAreRefused) {
  Append(300);
  ASSERT_TRUE(Save(CancelToken(), "data").ok());
  const std::string whole = Read(Folder() / kManifestName);
  const std::string rows = *std::next(Names().rbegin());  // tokens [0, 256)
  ASSERT_THAT(rows, HasSubstr("rows-0000000000-0000000256"));
  const std::string deep(100000, '[');
  const std::pair<std::string, std::string> forgeries[] = {
      {"\"token_count\": 300", "\"token_count\": -1"},
      {"\"token_count\": 300", "\"token_count\": 300.5"},
      {"\"token_count\": 300", "\"token_count\": \"300\""},
      {"\"token_count\": 300", "\"token_count\": null"},
      {"\"token_count\": 300", "\"token_count\": 18446744073709551615"},
      {"\"token_count\": 300", "\"token_count\": 4294967295"},
      {"\"token_count\": 300", "\"token_count\": 1e300"},
      {"\"tokens_per_file\": 256", "\"tokens_per_file\": 0"},
      {"\"tokens_per_file\": 256", "\"tokens_per_file\": 300"},
      {"\"token_end\": 256", "\"token_end\": 255"},
      {"\"token_start\": 0", "\"token_start\": 1"},
      {"\"bytes\": 4", "\"bytes\": 4000000000000"},
      {absl::StrCat("\"name\": \"", rows), "\"name\": \"/etc/passwd"},
      {absl::StrCat("\"name\": \"", rows), "\"name\": \"../chat/" + rows},
      {absl::StrCat("\"name\": \"", rows), "\"other\": \"" + rows},
      {"\"files\": [", "\"files\": [1, "},
      {"\"files\": [", "\"files\": [[],"},
      {"\"format\": \"spillway-snapshot\"", "\"format\": \"another\""},
      {"\"model_message\": \"", "\"model_message\": \"?"},
      {"\"model\": {", "\"model\": {}, \"more\": {"},
      {"\"weights_sha256\": \"\"", "\"weights_sha256\": \"abc\""},
      {"\"client_data\": {", "\"client_data\": {\"a\": " + deep + ", "},
      {"\"client_data\": {", "\"client_data\": [], \"b\": {"},
  };
  for (const auto& [old, with] : forgeries) {
    Forge(old, with);
    const absl::Status status = Load();
    EXPECT_TRUE(absl::IsDataLoss(status)) << with.substr(0, 80) << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(kManifestName));
    Write(Folder() / kManifestName, whole);
  }
  Forge("\"format_version\": 1", "\"format_version\": 2");
  const absl::Status version = Load();
  EXPECT_TRUE(absl::IsFailedPrecondition(version));
  EXPECT_EQ(DetailsOf(version).reason, "SNAPSHOT_VERSION");
  // Too large, so it is not parsed.
  Write(Folder() / kManifestName, std::string((16 << 20) + 1, '['));
  EXPECT_TRUE(absl::IsDataLoss(Load()));
  Write(Folder() / kManifestName, std::string(4096, '['));
  EXPECT_TRUE(absl::IsDataLoss(Load()));
}

TEST_F(SnapshotTest, RowsThatAreNoNumbersAreFound) {
  Append(10);
  // Written in place, because rows in a snapshot may come from elsewhere.
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(const_cast<std::byte*>(rows_[1].Row(3, 7)) + 512, &nan, sizeof(nan));
  ASSERT_TRUE(Save().ok());
  const absl::Status status = Load();
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("rows-0000000000-0000000010"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("token 7"));
}

TEST_F(SnapshotTest, FoldersAreLocked) {
  Append(10);
  ASSERT_TRUE(Save().ok());
  {
    const auto saving = SnapshotFolder::OpenToSave(root_, "chat");
    EXPECT_EQ(DetailsOf(Save().status()).reason, "SNAPSHOT_BUSY");
    EXPECT_TRUE(absl::IsAborted(Load()));
  }
  const auto loading = SnapshotFolder::OpenToLoad(root_, "chat");
  EXPECT_TRUE(Load().ok());
  EXPECT_TRUE(absl::IsAborted(Save().status()));
}

TEST_F(SnapshotTest, NamesStayBelowTheRoot) {
  for (const char* name : {"", "/", "/tmp", "..", "a/..", "../a", "a//b", "a/", ".a", "A", "a b",
                           "a\n", "a/b/c/d/e/f/g/h/i/j/k/l/m/n/o/p/q"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(SnapshotFolder::OpenToSave(root_, name).status())) << name;
    EXPECT_TRUE(absl::IsInvalidArgument(SnapshotFolder::OpenToLoad(root_, name).status())) << name;
  }
  EXPECT_FALSE(fs::exists(root_));
  EXPECT_TRUE(SnapshotFolder::OpenToSave(root_, "a/b.c/d-e_f").ok());
  EXPECT_EQ(fs::status(root_ / "a").permissions() & fs::perms::all, fs::perms::owner_all);
  EXPECT_EQ(DetailsOf(SnapshotFolder::OpenToSave("", "a").status()).reason, "NO_SNAPSHOT_FOLDER");
  // With the root `/`, any absolute path is allowed.
  const std::string anywhere = root_ / "Any where/ü";
  EXPECT_TRUE(SnapshotFolder::OpenToSave("/", anywhere).ok());
  EXPECT_TRUE(fs::is_directory(anywhere));
  EXPECT_TRUE(absl::IsInvalidArgument(SnapshotFolder::OpenToSave("/", "a").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(SnapshotFolder::OpenToSave("/", "/tmp/../etc").status()));
  EXPECT_TRUE(
      absl::IsInvalidArgument(SnapshotFolder::OpenToSave("/", std::string("/tmp\0x", 6)).status()));
  fs::create_directory_symlink(root_ / "a", root_ / "link");
  EXPECT_FALSE(SnapshotFolder::OpenToSave(root_, "link").ok());
  EXPECT_FALSE(SnapshotFolder::OpenToLoad(root_, "link/b.c").ok());
}

TEST_F(SnapshotTest, FilesAreChargedUntilTheyAreRemoved) {
  const auto account = std::make_shared<Account>("a");
  const auto save = [&]() -> absl::Status {
    absl::StatusOr<SnapshotFolder> folder = SnapshotFolder::OpenToSave(root_, "a/chat", account);
    if (!folder.ok()) return folder.status();
    return SaveSnapshot(*folder, spec_, rows_, Described(), {}, budget_, CancelToken()).status();
  };
  // What a daemon that starts would find.
  const auto found = [&] {
    AccountTable accounts;
    ChargeSnapshots(root_, accounts);
    return accounts.Of("a")->used_bytes();
  };
  Append(10);
  ASSERT_TRUE(save().ok());
  const int64_t used = account->used_bytes();
  // The rows, the manifest and two folders.
  EXPECT_GT(used, 10 * (32 << 10) * 2);
  EXPECT_EQ(found(), used);
  ASSERT_TRUE(save().ok());
  EXPECT_EQ(account->used_bytes(), used);
  // With more tokens, it does not fit.
  account->SetQuota({.bytes_max = used + 8192});
  Append(2 * kTokensPerFile);
  EXPECT_EQ(DetailsOf(save()).reason, "QUOTA_EXHAUSTED");
  EXPECT_EQ(account->used_bytes(), used);
  {
    const auto loading = SnapshotFolder::OpenToLoad(root_, "a/chat");
    EXPECT_EQ(DetailsOf(RemoveSnapshot(root_, "a/chat", account)).reason, "SNAPSHOT_BUSY");
  }
  ASSERT_TRUE(RemoveSnapshot(root_, "a/chat", account).ok());
  EXPECT_EQ(account->used_bytes(), 0);
  EXPECT_FALSE(fs::exists(root_ / "a"));
  EXPECT_EQ(DetailsOf(RemoveSnapshot(root_, "a/chat", account)).reason, "SNAPSHOT_NOT_FOUND");
  account->SetQuota({.bytes_max = 4096});
  EXPECT_EQ(DetailsOf(save()).reason, "QUOTA_EXHAUSTED");
  EXPECT_EQ(account->used_bytes(), 4096);
  // The folder that the refused save has made.
  EXPECT_EQ(found(), 4096);
}

TEST_F(SnapshotTest, OthersFilesAreLeftAlone) {
  Append(10);
  fs::create_directories(Folder());
  Write(Folder() / "manifest.json", "{\"name\": \"a web page\"}");
  const absl::Status status = Save().status();
  EXPECT_EQ(DetailsOf(status).reason, "NOT_A_SNAPSHOT");
  fs::remove(Folder() / "manifest.json");
  Write(Folder() / "notes.txt", "mine");
  Write(Folder() / "model.safetensors", "mine");
  ASSERT_TRUE(Save().ok());
  ASSERT_TRUE(Save().ok());
  EXPECT_TRUE(Names().contains("notes.txt"));
  EXPECT_TRUE(Names().contains("model.safetensors"));
}

TEST(DescribeModelTest, DifferencesAreNamed) {
  ModelSpec spec;
  spec.layer_count = 2;
  spec.query_head_count = spec.kv_head_count = 4;
  spec.head_dim = 64;
  ASSERT_TRUE(Normalize(spec).empty());
  ModelSpec other = spec;
  EXPECT_EQ(FirstDifference(DescribeModel("models/a", spec), DescribeModel("models/b", spec)), "");
  other.hash.seed = 7;
  EXPECT_THAT(FirstDifference(DescribeModel("models/a", spec), DescribeModel("models/a", other)),
              HasSubstr("hash_weights is {\"kind\":\"rotation\""));
  ModelSpec sinks = spec;
  sinks.sink_logits = {1, 2, 3, 4, 5, 6, 7, 8};
  const std::string plain = DescribeModel("models/a", spec);
  const std::string of_sinks = DescribeModel("models/a", sinks);
  EXPECT_THAT(FirstDifference(plain, of_sinks),
              AllOf(HasSubstr("sink_logits_sha256 is \""), HasSubstr("saved was nothing")));
  EXPECT_THAT(FirstDifference(of_sinks, plain), HasSubstr("sink_logits_sha256 is nothing"));
  EXPECT_EQ(FirstDifference(of_sinks, of_sinks), "");
  sinks.sink_logits[7] = 9;
  EXPECT_THAT(FirstDifference(of_sinks, DescribeModel("models/a", sinks)),
              HasSubstr("sink_logits_sha256"));
  // A name that is not UTF-8.
  EXPECT_THAT(DescribeModel("models/\xFF", spec), HasSubstr("\"layer_count\":2"));
}

}  // namespace
}  // namespace spillway

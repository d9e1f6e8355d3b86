#include "daemon/config/watched_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

namespace spillway {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class WatchedFileTest : public ::testing::Test {
 protected:
  WatchedFileTest() {
    std::string pattern = testing::TempDir() + "/watched_XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  ~WatchedFileTest() override { fs::remove_all(folder_); }

  std::string Write(const std::string& text) const {
    std::ofstream(folder_ / "file") << text;
    return folder_ / "file";
  }

  fs::path folder_;
};

TEST_F(WatchedFileTest, EachReadFindsWhatIsThereThen) {
  WatchedFile file(Write("one"), 100);
  EXPECT_EQ(file.Read(WatchedFile::kNeeded)->text, "one");
  Write("");
  EXPECT_EQ(file.Read(WatchedFile::kNeeded)->text, "");
  fs::remove(folder_ / "file");
  EXPECT_THAT(std::string(file.Read(WatchedFile::kNeeded).status().message()),
              HasSubstr("/file: cannot be read: No such file"));
  Write("two");
  EXPECT_EQ(file.Read(WatchedFile::kNeeded)->text, "two");
}

TEST_F(WatchedFileTest, OnlyRegularFilesOfALimitedSizeAreRead) {
  const std::string pipe = folder_ / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& path : {pipe, std::string("/dev/zero"), folder_.string()}) {
    const absl::Status status = WatchedFile(path, 100).Read(WatchedFile::kNeeded).status();
    EXPECT_EQ(status, absl::InvalidArgumentError(path + ": is not a regular file"));
  }
  const std::string large = Write(std::string(100'001, 'x'));
  EXPECT_EQ(WatchedFile(large, 100'001).Read(WatchedFile::kNeeded)->text.size(), 100'001);
  EXPECT_EQ(WatchedFile(large, 100'000).Read(WatchedFile::kNeeded).status(),
            absl::InvalidArgumentError(large + ": has more than 100000 bytes"));
  // Its size is said to be 0.
  EXPECT_FALSE(WatchedFile("/proc/self/status", 1 << 20).Read(WatchedFile::kNeeded)->text.empty());
}

// A file system that answers only while the flag is set.
std::atomic<bool> answers;
std::atomic<int> reading_count;
absl::StatusOr<RegularFile> ReadSlowly(const std::string& path, int64_t) {
  ++reading_count;
  while (!answers) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  --reading_count;
  return RegularFile{path, 0};
}

TEST(WatchedFileThatHangsTest, NobodyWaitsForAFileSystemThatDoesNotAnswer) {
  answers = false;
  {
    WatchedFile file("a", 1, ReadSlowly);
    for (int i = 0; i < 3; ++i) {
      const absl::Status status = file.Read(absl::Milliseconds(10)).status();
      EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("a: its file system does not answer"));
    }
    EXPECT_EQ(reading_count, 1) << "one read for all";
    answers = true;
    EXPECT_EQ(file.Read(WatchedFile::kNeeded)->text, "a");
    answers = false;
    EXPECT_EQ(file.Read(absl::ZeroDuration())->text, "a") << "what the last read found, at first";
    const SteadyTime start = SteadyNow();
    while (file.Read(absl::Milliseconds(10)).ok()) {
      ASSERT_LT(SteadyNow(), After(start, absl::Minutes(1)));
    }
    EXPECT_GE(SteadyNow(), After(start, absl::Seconds(1)));
    EXPECT_EQ(reading_count, 1);
  }
  // The thread outlives the object, and touches nothing of it.
  answers = true;
  while (reading_count > 0) std::this_thread::yield();
}

}  // namespace
}  // namespace spillway

#include "services/log/log_queue.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "host/base/descriptor.h"
#include "spdlog/logger.h"

namespace spillway {
namespace {

constexpr size_t kPipeBytes = 4096;  // the smallest pipe that the system makes

// A queue that writes to a pipe of one page.
class LogQueueTest : public ::testing::Test {
 protected:
  LogQueueTest() {
    std::signal(SIGPIPE, SIG_IGN);
    std::array<int, 2> ends{};
    EXPECT_EQ(pipe2(ends.data(), O_CLOEXEC), 0);
    reader.emplace(ends[0]);
    writer = Descriptor(ends[1]);
    EXPECT_EQ(fcntl(writer.get(), F_SETPIPE_SZ, kPipeBytes), static_cast<int>(kPipeBytes));
    queue = std::make_unique<LogQueue>(
        writer.get(), 4, [](int64_t count) { return absl::StrCat("dropped ", count); });
    queue->logger()->set_pattern("%l %v");
  }

  // Fills the pipe, so that no further line fits.
  void Fill() {
    const std::string page(kPipeBytes, '.');
    ASSERT_EQ(write(writer.get(), page.data(), page.size()), static_cast<ssize_t>(page.size()));
  }

  std::string Read(size_t bytes) {
    std::string text(bytes, '\0');
    const ssize_t count = read(reader->get(), text.data(), text.size());
    text.resize(count > 0 ? static_cast<size_t>(count) : 0);
    return text;
  }

  std::optional<Descriptor> reader;
  Descriptor writer;
  std::unique_ptr<LogQueue> queue;
};

std::vector<std::string> LinesOf(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

TEST_F(LogQueueTest, LinesAreWrittenInOrder) {
  queue->logger()->info("one");
  queue->logger()->warn("two");
  EXPECT_TRUE(queue->WaitUntilWritten(absl::Minutes(1)));
  EXPECT_EQ(Read(kPipeBytes), "info one\nwarning two\n");
  EXPECT_EQ(queue->dropped_line_count(), 0);
}

TEST_F(LogQueueTest, WhoLogsDoesNotWaitForWhoReads) {
  Fill();
  for (int i = 0; i < 100; ++i) queue->logger()->info(std::to_string(i));
  // All lines are dropped except the four that the queue holds, and possibly one that the thread
  // has taken to write.
  const int64_t dropped = queue->dropped_line_count();
  EXPECT_GE(dropped, 95);
  EXPECT_LE(dropped, 96);
  // The mark of WaitUntilWritten takes the place of a line.
  EXPECT_FALSE(queue->WaitUntilWritten(absl::Milliseconds(10)));
  EXPECT_EQ(Read(kPipeBytes), std::string(kPipeBytes, '.'));
  EXPECT_TRUE(queue->WaitUntilWritten(absl::Minutes(1)));
}

TEST_F(LogQueueTest, TheNextLineThatGetsThroughComesAfterTheNumberOfThoseDropped) {
  Fill();
  for (int i = 0; i < 100; ++i) queue->logger()->info(std::to_string(i));
  Read(kPipeBytes);
  ASSERT_TRUE(queue->WaitUntilWritten(absl::Minutes(1)));
  const std::vector<std::string> lines = LinesOf(Read(kPipeBytes));
  ASSERT_FALSE(lines.empty());
  EXPECT_EQ(lines.back(), "info 99");
  // The thread may have taken any of the lines before the pipe blocked it.
  int64_t dropped = 0, written = 0;
  for (const std::string& line : lines) {
    int64_t count = 0;
    if (absl::SimpleAtoi(line.substr(line.rfind(' ')), &count) && line.starts_with("warning")) {
      dropped += count;
    } else {
      ++written;
    }
  }
  EXPECT_EQ(dropped, queue->dropped_line_count());
  EXPECT_EQ(dropped + written, 100);
  queue->logger()->info("later");
  ASSERT_TRUE(queue->WaitUntilWritten(absl::Minutes(1)));
  EXPECT_EQ(Read(kPipeBytes), "info later\n");
}

TEST_F(LogQueueTest, LinesThatNobodyCanReadAreCounted) {
  reader.reset();
  for (int i = 0; i < 3; ++i) {
    queue->logger()->info("to nobody");
    ASSERT_TRUE(queue->WaitUntilWritten(absl::Minutes(1)));
  }
  EXPECT_EQ(queue->dropped_line_count(), 3);
}

TEST_F(LogQueueTest, ADescriptorThatSomebodyMadeNonBlockingIsWaitedFor) {
  Fill();
  ASSERT_EQ(fcntl(writer.get(), F_SETFL, O_NONBLOCK), 0);
  queue->logger()->info("patience");
  EXPECT_FALSE(queue->WaitUntilWritten(absl::Milliseconds(10)));
  Read(kPipeBytes);
  ASSERT_TRUE(queue->WaitUntilWritten(absl::Minutes(1)));
  EXPECT_EQ(Read(kPipeBytes), "info patience\n");
  EXPECT_EQ(queue->dropped_line_count(), 0);
}

}  // namespace
}  // namespace spillway

#include "host/memory/shared_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

namespace spillway {
namespace {

constexpr int64_t kBytes = 1 << 20;

int64_t PageBytesOf(const Descriptor& file) {
  struct stat info {};
  EXPECT_EQ(fstat(file.get(), &info), 0);
  return info.st_blocks * 512;
}

class SharedMemoryTest : public ::testing::Test {
 protected:
  std::byte* Map(const Descriptor& file) {
    void* const mapped = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
    EXPECT_NE(mapped, MAP_FAILED);
    return static_cast<std::byte*>(mapped);
  }

  const std::unique_ptr<SharedMemory> memory = *SharedMemory::Create(kBytes);
};

TEST_F(SharedMemoryTest, IsZeroAndNobodyChangesItsSize) {
  EXPECT_EQ(memory->bytes().size(), static_cast<size_t>(kBytes));
  for (const std::byte byte : memory->bytes()) ASSERT_EQ(byte, std::byte{0});
  const Descriptor other = *memory->Share();
  EXPECT_EQ(PageBytesOf(other), kBytes);
  for (const int64_t size : {int64_t{0}, 2 * kBytes}) {
    EXPECT_NE(ftruncate(other.get(), size), 0);
    EXPECT_EQ(errno, EPERM);
  }
  memory->bytes()[5] = std::byte{7};
  std::byte* const mapped = Map(other);
  EXPECT_EQ(mapped[5], std::byte{7});
  munmap(mapped, kBytes);
}

TEST_F(SharedMemoryTest, IsHeldUntilNobodyHasADescriptorOrAMapping) {
  EXPECT_FALSE(memory->IsHeld());
  Descriptor first = *memory->Share();
  EXPECT_TRUE(memory->IsHeld());
  std::byte* const mapped = Map(first);
  first = Descriptor();
  EXPECT_TRUE(memory->IsHeld());
  munmap(mapped, kBytes);
  EXPECT_FALSE(memory->IsHeld());
  // The same after Free(), with a descriptor that was copied and one that can only read.
  Descriptor copy;
  {
    const Descriptor second = *memory->Share();
    copy = Descriptor(fcntl(second.get(), F_DUPFD_CLOEXEC, 0));
  }
  memory->Free();
  EXPECT_TRUE(memory->IsHeld());
  Descriptor reader(
      open(("/proc/self/fd/" + std::to_string(copy.get())).c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(reader.valid());
  copy = Descriptor();
  EXPECT_TRUE(memory->IsHeld());
  reader = Descriptor();
  EXPECT_FALSE(memory->IsHeld());
}

TEST_F(SharedMemoryTest, ItsPagesAreFreeAlthoughOthersHaveMappedIt) {
  const Descriptor other = *memory->Share();
  std::byte* const mapped = Map(other);
  std::memset(mapped, 1, kBytes);
  memory->Free();
  EXPECT_TRUE(memory->bytes().empty());
  EXPECT_EQ(PageBytesOf(other), 0);
  EXPECT_EQ(mapped[kBytes / 2], std::byte{0});
  // Only what the other process writes then is allocated again, and it is still known as held.
  std::memset(mapped, 1, kBytes);
  EXPECT_EQ(PageBytesOf(other), kBytes);
  EXPECT_TRUE(memory->IsHeld());
  munmap(mapped, kBytes);
}

TEST_F(SharedMemoryTest, OtherUsersCannotOpenItAgain) {
  const Descriptor other = *memory->Share();
  struct stat info {};
  ASSERT_EQ(fstat(other.get(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600U);
}

}  // namespace
}  // namespace spillway

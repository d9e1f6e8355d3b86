#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "host/base/mutex.h"
#include "host/memory/arena_file.h"
#include "host/memory/memory_budget.h"

namespace spillway {

// A record's place in its file; 0: none.
using RecordIndex = uint32_t;

// What a record is. What a process that reads the file later finds by itself are
// models and sequences; all else it finds through them.
enum class RecordKind : uint32_t { kFree, kPart, kModel, kSequence };

// As it lies in the file.
struct Record {
  static constexpr size_t kBytes = 512;

  std::atomic<uint32_t> kind;  // RecordKind
  std::atomic<uint32_t> next;  // of a chain
  std::byte payload[kBytes - 2 * sizeof(uint32_t)];
};
static_assert(sizeof(Record) == Record::kBytes && std::atomic<uint32_t>::is_always_lock_free);

// What an engine knows of the rows in its arena's file, in a file beside it: records of one size
// in mapped memory. A process that is killed at any moment leaves what it has written, in the
// order in which it wrote it; whoever opens the file next finds all records that a listed one
// leads to, and takes the rest for free. Thread-safe, but for what one record holds.
class RecordFile {
 public:
  // Maps the file, and begins it where it is empty. rows_number: ArenaFile::number() of the file
  // of rows that it speaks of. Its memory is charged to the budget. FAILED_PRECONDITION for a file
  // of something else, of another version, or of other rows.
  static absl::StatusOr<std::unique_ptr<RecordFile>> Open(std::unique_ptr<ArenaFile> file,
                                                          uint64_t rows_number,
                                                          MemoryBudget* budget);
  ~RecordFile();
  RecordFile(const RecordFile&) = delete;
  RecordFile& operator=(const RecordFile&) = delete;

  // A random text of 24 digits that the file has kept since it began.
  const std::string& identity() const { return identity_; }

  // What a device has to know of the memory that is mapped: called for what is now, and for what is
  // to come before it is used. An error is that of Allocate(). Null functions: no more.
  struct Observer {
    std::function<absl::Status(std::span<std::byte>)> mapped;
    std::function<void(std::span<std::byte>)> released;
  };
  // Who observed before is told that all is released.
  absl::Status Observe(Observer observer) ABSL_LOCKS_EXCLUDED(mutex_);

  // --- Reading what a process before this one left. Once, before the first Allocate().

  // The records of a kind.
  std::vector<RecordIndex> Find(RecordKind kind) const;
  // Says that it is used. DATA_LOSS for one that is not there, or that somebody uses already.
  absl::Status Claim(RecordIndex record) ABSL_LOCKS_EXCLUDED(mutex_);
  // All that nobody claimed is free now.
  void FreeUnclaimed() ABSL_LOCKS_EXCLUDED(mutex_);

  // --- Writing.

  // A record of kind kPart without a next. RESOURCE_EXHAUSTED. Its payload is undefined.
  absl::StatusOr<RecordIndex> Allocate() ABSL_LOCKS_EXCLUDED(mutex_);
  void Free(RecordIndex record) ABSL_LOCKS_EXCLUDED(mutex_);
  // With all that follow it in its chain; `record` may be 0.
  void FreeChain(RecordIndex record);

  // REQUIRES: allocated or claimed. Stays where it is.
  Record& At(RecordIndex record) const { return reinterpret_cast<Record*>(base_)[record]; }
  template <typename T>
  T& Payload(RecordIndex record) const {
    static_assert(sizeof(T) <= sizeof(Record::payload));
    return *reinterpret_cast<T*>(At(record).payload);
  }

  // Bytes, at least one, in a chain of records. RESOURCE_EXHAUSTED leaves nothing.
  absl::StatusOr<RecordIndex> WriteBytes(std::string_view bytes);
  // Claims the chain and reads it. DATA_LOSS, also for no bytes.
  absl::StatusOr<std::string> ReadBytes(RecordIndex first, int64_t byte_count);

 private:
  RecordFile(std::unique_ptr<ArenaFile> file, MemoryBudget* budget, std::byte* base,
             int64_t capacity_bytes)
      : file_(std::move(file)), budget_(budget), base_(base), capacity_bytes_(capacity_bytes) {}

  absl::Status ReadHeader(uint64_t rows_number);
  absl::Status Show(std::span<std::byte> memory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Maps the file from what is mapped to `bytes`, which are allocated first.
  absl::Status Grow(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::unique_ptr<ArenaFile> file_;
  MemoryBudget* const budget_;
  std::byte* const base_;
  const int64_t capacity_bytes_;  // of address space
  std::string identity_;
  mutable Mutex mutex_;
  Observer observer_ ABSL_GUARDED_BY(mutex_);
  // That the observer knows.
  std::vector<std::span<std::byte>> observed_ ABSL_GUARDED_BY(mutex_);
  int64_t mapped_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<MemoryReservation> reservations_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> claimed_ ABSL_GUARDED_BY(mutex_);
  std::vector<RecordIndex> free_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway

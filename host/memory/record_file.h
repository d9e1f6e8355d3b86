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

// A record's position in its file; 0: no record.
using RecordIndex = uint32_t;

// The type of a record. A later process searches for models and sequences, and finds other records
// through them.
enum class RecordKind : uint32_t { kFree, kPart, kModel, kSequence };

// Layout of a record in the file.
struct Record {
  static constexpr size_t kBytes = 512;

  std::atomic<uint32_t> kind;  // RecordKind
  std::atomic<uint32_t> next;  // next record of a chain; 0: the last
  std::byte payload[kBytes - 2 * sizeof(uint32_t)];
};
static_assert(sizeof(Record) == Record::kBytes && std::atomic<uint32_t>::is_always_lock_free);

// What an engine knows about the rows in its arena's file: a second file, mapped and divided into
// records of one size. When a process is killed, the file has what the process wrote up to then, in
// that order. The next process finds all records that a listed record refers to, and frees the
// others. Thread-safe, except for the contents of a record.
class RecordFile {
 public:
  // Maps the file; initialises an empty one. rows_number: ArenaFile::number() of the file of rows
  // that it describes. The mapped memory is charged to the budget. FAILED_PRECONDITION if the file
  // is no record file, has another version, or describes another file of rows.
  static absl::StatusOr<std::unique_ptr<RecordFile>> Open(std::unique_ptr<ArenaFile> file,
                                                          uint64_t rows_number,
                                                          MemoryBudget* budget);
  ~RecordFile();
  RecordFile(const RecordFile&) = delete;
  RecordFile& operator=(const RecordFile&) = delete;

  // 24 random hexadecimal digits, which the file has had since it was initialised.
  const std::string& identity() const { return identity_; }

  // Tells a device about the mapped memory. `mapped` is called for the present memory, and for new
  // memory before its first use; Allocate() returns its error. Null functions: no observer.
  struct Observer {
    std::function<absl::Status(std::span<std::byte>)> mapped;
    std::function<void(std::span<std::byte>)> released;
  };
  // Replaces the observer, after the old one was told that all memory is released.
  absl::Status Observe(Observer observer) ABSL_LOCKS_EXCLUDED(mutex_);

  // --- Reading what an earlier process left. To be called once, before the first Allocate().

  // All records of this kind.
  std::vector<RecordIndex> Find(RecordKind kind) const;
  // Marks the record as used. DATA_LOSS if it does not exist or is in use already.
  absl::Status Claim(RecordIndex record) ABSL_LOCKS_EXCLUDED(mutex_);
  // Frees all records that were not claimed.
  void FreeUnclaimed() ABSL_LOCKS_EXCLUDED(mutex_);

  // --- Writing.

  // A record of kind kPart without a next record. Its payload is undefined. RESOURCE_EXHAUSTED.
  absl::StatusOr<RecordIndex> Allocate() ABSL_LOCKS_EXCLUDED(mutex_);
  void Free(RecordIndex record) ABSL_LOCKS_EXCLUDED(mutex_);
  // Frees a record and all that follow in its chain. `record` may be 0.
  void FreeChain(RecordIndex record);

  // The record's address never changes. REQUIRES: it was allocated or claimed.
  Record& At(RecordIndex record) const { return reinterpret_cast<Record*>(base_)[record]; }
  template <typename T>
  T& Payload(RecordIndex record) const {
    static_assert(sizeof(T) <= sizeof(Record::payload));
    return *reinterpret_cast<T*>(At(record).payload);
  }

  // Writes at least one byte to a new chain of records. RESOURCE_EXHAUSTED leaves no records.
  absl::StatusOr<RecordIndex> WriteBytes(std::string_view bytes);
  // Claims the chain and reads its bytes. DATA_LOSS, also if byte_count is not positive.
  absl::StatusOr<std::string> ReadBytes(RecordIndex first, int64_t byte_count);

 private:
  RecordFile(std::unique_ptr<ArenaFile> file, MemoryBudget* budget, std::byte* base,
             int64_t capacity_bytes)
      : file_(std::move(file)), budget_(budget), base_(base), capacity_bytes_(capacity_bytes) {}

  absl::Status ReadHeader(uint64_t rows_number);
  absl::Status Show(std::span<std::byte> memory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Allocates and maps the file up to `bytes`.
  absl::Status Grow(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::unique_ptr<ArenaFile> file_;
  MemoryBudget* const budget_;
  std::byte* const base_;
  const int64_t capacity_bytes_;  // address space
  std::string identity_;
  mutable Mutex mutex_;
  Observer observer_ ABSL_GUARDED_BY(mutex_);
  // The memory that the observer was told of.
  std::vector<std::span<std::byte>> observed_ ABSL_GUARDED_BY(mutex_);
  int64_t mapped_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<MemoryReservation> reservations_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> claimed_ ABSL_GUARDED_BY(mutex_);
  std::vector<RecordIndex> free_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway

#pragma once

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
#include "host/memory/checksum.h"
#include "host/memory/memory_budget.h"

namespace spillway {

// A record's position in its file; 0: no record.
using RecordIndex = uint32_t;

// The type of a record. A later process searches for models and sequences, and finds other records
// through them. The values differ in many bits, so that damage makes none of them from another.
enum class RecordKind : uint32_t {
  kFree = 0,
  kPart = 0x5A3C96F0,
  kModel = 0xC3A5690F,
  kSequence = 0x996655AA,
};

// Layout of a record in the file. All that a later process believes is under a checksum.
struct Record {
  static constexpr size_t kBytes = 512;

  std::atomic<uint32_t> kind;  // RecordKind
  uint32_t unused;
  CheckedWord next;  // next record of a chain; 0: the last. Its salt is kNextSalt.
  std::byte payload[kBytes - 4 * sizeof(uint32_t)];

  static constexpr uint64_t kNextSalt = 1;
};
static_assert(sizeof(Record) == Record::kBytes && std::atomic<uint32_t>::is_always_lock_free);

// Where a text is: in a chain of records.
struct RecordText {
  uint64_t first = 0;  // RecordIndex
  uint64_t byte_count = 0;
  uint64_t text_sum = 0;
  uint64_t sum = 0;  // of the members above

  uint64_t Sum() const;
};

// The beginning of the payload of a model and of a sequence: what is the same from its listing on.
struct RecordRoot {
  RecordText description;
  uint32_t numbers[4] = {};  // for the kind of record
  uint64_t sum = 0;          // of the members above and of the kind

  uint64_t Sum(RecordKind kind) const;
};

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
  // Records whose kind is damaged and that were not claimed. Each may have been a model's or a
  // sequence's.
  std::vector<RecordIndex> FindDamaged() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Marks the record as used. DATA_LOSS if it does not exist or is in use already.
  absl::Status Claim(RecordIndex record) ABSL_LOCKS_EXCLUDED(mutex_);
  // The same for the record after a claimed one in its chain.
  absl::StatusOr<RecordIndex> ClaimNext(RecordIndex record) ABSL_LOCKS_EXCLUDED(mutex_);
  // The same for a model's or a sequence's record, whose payload begins with a RecordRoot.
  // DATA_LOSS, without a claim, also if that is damaged.
  absl::Status ClaimRoot(RecordIndex record, RecordKind kind) ABSL_LOCKS_EXCLUDED(mutex_);
  // DATA_LOSS for a record: names it, its place and the file.
  absl::Status Damaged(RecordIndex record, std::string_view what) const;
  // The description of a model or a sequence whose record may be damaged, without a claim; empty if
  // it cannot be read. No checksum but the text's own is needed.
  std::string DescriptionOf(RecordIndex record) const;
  // How many records were claimed, and the opposite of all claims but the first `count`.
  size_t claim_count() const ABSL_LOCKS_EXCLUDED(mutex_);
  void Unclaim(size_t count) ABSL_LOCKS_EXCLUDED(mutex_);
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
  absl::StatusOr<RecordText> WriteText(std::string_view text);
  // Claims the chain and reads its text. DATA_LOSS if it is damaged.
  absl::StatusOr<std::string> ReadText(const RecordText& text);

 private:
  RecordFile(std::unique_ptr<ArenaFile> file, MemoryBudget* budget, std::byte* base,
             int64_t capacity_bytes)
      : file_(std::move(file)), budget_(budget), base_(base), capacity_bytes_(capacity_bytes) {}

  absl::Status ReadHeader(uint64_t rows_number);
  // Whether a record with this index is mapped.
  bool IsRecord(uint64_t index) const ABSL_LOCKS_EXCLUDED(mutex_);
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
  std::vector<RecordIndex> claims_ ABSL_GUARDED_BY(mutex_);  // in order
  std::vector<RecordIndex> free_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway

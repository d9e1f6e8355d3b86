#include "host/memory/record_file.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "host/base/random_id.h"
#include "host/base/status_macros.h"
#include "host/memory/arena.h"

namespace spillway {
namespace {

constexpr char kMagic[8] = {'S', 'P', 'I', 'L', 'L', 'W', 'A', 'Y'};
constexpr uint32_t kVersion = 1;
// Largest size of the file. The records need at most a thousandth of the bytes of the rows.
constexpr int64_t kCapacityBytes = int64_t{64} << 30;
constexpr int64_t kGrowthBytes = kSlabBytes;

// The first record of the file.
struct Header {
  std::atomic<uint64_t> magic;  // written last
  uint32_t version;
  uint32_t record_bytes;
  char identity[24];
  uint64_t rows_number;
};
static_assert(sizeof(Header) <= Record::kBytes);

uint64_t MagicWord() {
  uint64_t word = 0;
  std::memcpy(&word, kMagic, sizeof(word));
  return word;
}

}  // namespace

absl::StatusOr<std::unique_ptr<RecordFile>> RecordFile::Open(std::unique_ptr<ArenaFile> file,
                                                             uint64_t rows_number,
                                                             MemoryBudget* budget) {
  ASSIGN_OR_RETURN(const int64_t size, file->size_bytes());
  if (size % kGrowthBytes != 0 || size > kCapacityBytes) {
    return absl::FailedPreconditionError(
        absl::StrCat(file->path(), " has ", size, " bytes: it is not a file of Spillway"));
  }
  void* const base = mmap(nullptr, static_cast<size_t>(kCapacityBytes), PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return absl::ErrnoToStatus(errno, "address space for records");
  std::unique_ptr<RecordFile> records(
      new RecordFile(std::move(file), budget, static_cast<std::byte*>(base), kCapacityBytes));
  {
    const MutexLock lock(records->mutex_);
    RETURN_IF_ERROR(records->Grow(std::max(size, kGrowthBytes)));
    records->claimed_[0] = true;
  }
  RETURN_IF_ERROR(records->ReadHeader(rows_number));
  return records;
}

RecordFile::~RecordFile() { munmap(base_, static_cast<size_t>(capacity_bytes_)); }

absl::Status RecordFile::ReadHeader(uint64_t rows_number) {
  auto& header = *reinterpret_cast<Header*>(base_);
  const uint64_t magic = header.magic.load(std::memory_order_acquire);
  if (magic == 0) {
    // A new file, or one whose creator was killed before it wrote a record.
    identity_ = RandomId();
    header.version = kVersion;
    header.record_bytes = Record::kBytes;
    header.rows_number = rows_number;
    std::copy_n(identity_.begin(), sizeof(header.identity), header.identity);
    header.magic.store(MagicWord(), std::memory_order_release);
    return absl::OkStatus();
  }
  if (magic != MagicWord()) {
    return absl::FailedPreconditionError(absl::StrCat(file_->path(), " is not a file of Spillway"));
  }
  if (header.version != kVersion || header.record_bytes != Record::kBytes) {
    return absl::FailedPreconditionError(absl::StrCat(
        file_->path(), " has version ", header.version, ", but this build reads version ", kVersion,
        ": start the build that wrote it, or delete the folder's files"));
  }
  if (header.rows_number != rows_number) {
    return absl::FailedPreconditionError(
        absl::StrCat(file_->path(), " does not belong to the file of rows beside it; delete both"));
  }
  identity_.assign(header.identity, sizeof(header.identity));
  return absl::OkStatus();
}

absl::Status RecordFile::Grow(int64_t bytes) {
  const int64_t more = bytes - mapped_bytes_;
  if (bytes > capacity_bytes_) {
    return MemoryExhausted("records of rows", more, capacity_bytes_ - mapped_bytes_);
  }
  ASSIGN_OR_RETURN(MemoryReservation reservation,
                   budget_->Reserve(more, "records of rows", MemoryUse::kTables));
  RETURN_IF_ERROR(file_->Allocate(mapped_bytes_, more));
  if (mmap(base_ + mapped_bytes_, static_cast<size_t>(more), PROT_READ | PROT_WRITE,
           MAP_SHARED | MAP_FIXED, file_->descriptor(), mapped_bytes_) == MAP_FAILED) {
    return absl::ErrnoToStatus(errno, absl::StrCat("mapping of ", file_->path()));
  }
  RETURN_IF_ERROR(Show({base_ + mapped_bytes_, static_cast<size_t>(more)}));
  reservations_.push_back(std::move(reservation));
  mapped_bytes_ = bytes;
  claimed_.resize(static_cast<size_t>(bytes) / Record::kBytes, false);
  return absl::OkStatus();
}

absl::Status RecordFile::Show(std::span<std::byte> memory) {
  if (observer_.mapped == nullptr) return absl::OkStatus();
  RETURN_IF_ERROR(observer_.mapped(memory));
  observed_.push_back(memory);
  return absl::OkStatus();
}

absl::Status RecordFile::Observe(Observer observer) {
  const MutexLock lock(mutex_);
  for (const std::span<std::byte> memory : observed_) observer_.released(memory);
  observed_.clear();
  observer_ = std::move(observer);
  return Show({base_, static_cast<size_t>(mapped_bytes_)});
}

std::vector<RecordIndex> RecordFile::Find(RecordKind kind) const {
  std::vector<RecordIndex> found;
  const MutexLock lock(mutex_);
  for (size_t i = 1; i < claimed_.size(); ++i) {
    const auto index = static_cast<RecordIndex>(i);
    if (At(index).kind.load(std::memory_order_relaxed) == static_cast<uint32_t>(kind)) {
      found.push_back(index);
    }
  }
  return found;
}

absl::Status RecordFile::Claim(RecordIndex record) {
  const MutexLock lock(mutex_);
  if (record == 0 || record >= claimed_.size()) {
    return absl::DataLossError(absl::StrCat("record ", record, " is not in (0, ", claimed_.size(),
                                            ") of ", file_->path()));
  }
  if (claimed_[record]) {
    return absl::DataLossError(
        absl::StrCat("record ", record, " of ", file_->path(), " is used twice"));
  }
  claimed_[record] = true;
  return absl::OkStatus();
}

void RecordFile::FreeUnclaimed() {
  const MutexLock lock(mutex_);
  free_.clear();
  // In descending order, so that the lowest records are allocated first.
  for (size_t i = claimed_.size(); i-- > 1;) {
    if (claimed_[i]) continue;
    const auto index = static_cast<RecordIndex>(i);
    At(index).kind.store(static_cast<uint32_t>(RecordKind::kFree), std::memory_order_relaxed);
    free_.push_back(index);
  }
}

absl::StatusOr<RecordIndex> RecordFile::Allocate() {
  const MutexLock lock(mutex_);
  if (free_.empty()) {
    const size_t before = claimed_.size();
    RETURN_IF_ERROR(Grow(mapped_bytes_ + kGrowthBytes));
    for (size_t i = claimed_.size(); i-- > before;) free_.push_back(static_cast<RecordIndex>(i));
  }
  const RecordIndex index = free_.back();
  free_.pop_back();
  Record& record = At(index);
  record.next.store(0, std::memory_order_relaxed);
  record.kind.store(static_cast<uint32_t>(RecordKind::kPart), std::memory_order_relaxed);
  return index;
}

void RecordFile::Free(RecordIndex record) {
  At(record).kind.store(static_cast<uint32_t>(RecordKind::kFree), std::memory_order_relaxed);
  const MutexLock lock(mutex_);
  free_.push_back(record);
}

void RecordFile::FreeChain(RecordIndex record) {
  while (record != 0) {
    const RecordIndex next = At(record).next.load(std::memory_order_relaxed);
    Free(record);
    record = next;
  }
}

absl::StatusOr<RecordIndex> RecordFile::WriteBytes(std::string_view bytes) {
  constexpr size_t kPart = sizeof(Record::payload);
  RecordIndex first = 0;
  // Begins with the last part, so that each part is linked only to a written one.
  for (size_t parts = (bytes.size() + kPart - 1) / kPart; parts-- > 0;) {
    const absl::StatusOr<RecordIndex> index = Allocate();
    if (!index.ok()) {
      FreeChain(first);
      return index.status();
    }
    Record& record = At(*index);
    const std::string_view part = bytes.substr(parts * kPart, kPart);
    std::memcpy(record.payload, part.data(), part.size());
    record.next.store(first, std::memory_order_relaxed);
    first = *index;
  }
  return first;
}

absl::StatusOr<std::string> RecordFile::ReadBytes(RecordIndex first, int64_t byte_count) {
  constexpr int64_t kPart = sizeof(Record::payload);
  std::string bytes;
  if (byte_count <= 0) return absl::DataLossError("no bytes, where there should be some");
  for (int64_t left = byte_count; left > 0; left -= kPart) {
    RETURN_IF_ERROR(Claim(first));
    Record& record = At(first);
    bytes.append(reinterpret_cast<const char*>(record.payload),
                 static_cast<size_t>(std::min(left, kPart)));
    // Cut the chain, because the records that follow were not claimed.
    if (left <= kPart) record.next.store(0, std::memory_order_relaxed);
    first = record.next.load(std::memory_order_relaxed);
  }
  return bytes;
}

}  // namespace spillway

#include "host/memory/record_file.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <optional>

#include "absl/strings/str_cat.h"
#include "host/base/random_id.h"
#include "host/base/status_macros.h"
#include "host/memory/arena.h"

namespace spillway {
namespace {

constexpr char kMagic[8] = {'S', 'P', 'I', 'L', 'L', 'W', 'A', 'Y'};
constexpr uint32_t kVersion = 2;
// Largest size of the file. The records need at most a five-hundredth of the bytes of the rows.
constexpr int64_t kCapacityBytes = int64_t{64} << 30;
constexpr int64_t kGrowthBytes = kSlabBytes;

// The first record of the file has it twice, so that damage to one of them loses nothing.
struct Header {
  std::atomic<uint64_t> magic;  // written last
  uint32_t version;
  uint32_t record_bytes;
  char identity[24];
  uint64_t rows_number;
  uint64_t sum;  // of the members above except the magic

  uint64_t Sum() const {
    return Checksum(
        {reinterpret_cast<const char*>(&version), offsetof(Header, sum) - sizeof(magic)}, 0);
  }
};
constexpr int kHeaders = 2;
static_assert(kHeaders * sizeof(Header) <= Record::kBytes);

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
  auto* const headers = reinterpret_cast<Header*>(base_);
  const auto has_magic = [&](const Header& header) {
    return header.magic.load(std::memory_order_acquire) == MagicWord();
  };
  const auto intact = [&](const Header& header) {
    return has_magic(header) && header.version == kVersion &&
           header.record_bytes == Record::kBytes && header.sum == header.Sum();
  };
  Header* const end = headers + kHeaders;
  const Header* const good = std::find_if(headers, end, intact);
  if (good == end) {
    const Header* const other = std::find_if(headers, end, has_magic);
    if (other != end && other->version != kVersion) {
      return absl::FailedPreconditionError(absl::StrCat(
          file_->path(), " has version ", other->version, ", but this build reads version ",
          kVersion, ": start the build that wrote it, or delete the folder's files"));
    }
    if (other != end || headers[0].magic.load(std::memory_order_relaxed) != 0) {
      return absl::FailedPreconditionError(
          absl::StrCat(file_->path(),
                       " is not a file of Spillway, or its header is damaged: delete the "
                       "folder's files to begin with empty ones"));
    }
    // A new file, or one whose creator was killed before it wrote a record.
    identity_ = RandomId();
  } else {
    if (good->rows_number != rows_number) {
      return absl::FailedPreconditionError(absl::StrCat(
          file_->path(), " does not belong to the file of rows beside it; delete both"));
    }
    identity_.assign(good->identity, sizeof(good->identity));
  }
  for (Header* header = headers; header < end; ++header) {
    if (intact(*header)) continue;
    header->version = kVersion;
    header->record_bytes = Record::kBytes;
    header->rows_number = rows_number;
    std::copy_n(identity_.begin(), sizeof(header->identity), header->identity);
    header->sum = header->Sum();
    header->magic.store(MagicWord(), std::memory_order_release);
  }
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

std::vector<RecordIndex> RecordFile::FindDamaged() const {
  constexpr RecordKind kKinds[] = {RecordKind::kFree, RecordKind::kPart, RecordKind::kModel,
                                   RecordKind::kSequence};
  std::vector<RecordIndex> found;
  const MutexLock lock(mutex_);
  for (size_t i = 1; i < claimed_.size(); ++i) {
    if (claimed_[i]) continue;
    const auto index = static_cast<RecordIndex>(i);
    const auto kind = static_cast<RecordKind>(At(index).kind.load(std::memory_order_relaxed));
    if (std::find(std::begin(kKinds), std::end(kKinds), kind) == std::end(kKinds)) {
      found.push_back(index);
    }
  }
  return found;
}

bool RecordFile::IsRecord(uint64_t index) const {
  const MutexLock lock(mutex_);
  return index > 0 && index < claimed_.size();
}

absl::Status RecordFile::Damaged(RecordIndex record, std::string_view what) const {
  return absl::DataLossError(absl::StrCat("record ", record, ", at byte ",
                                          int64_t{record} * int64_t{Record::kBytes}, " of ",
                                          file_->path(), ": ", std::string(what)));
}

absl::Status RecordFile::Claim(RecordIndex record) {
  if (!IsRecord(record)) return Damaged(record, "there is no such record");
  const MutexLock lock(mutex_);
  if (claimed_[record]) return Damaged(record, "it is used twice");
  claimed_[record] = true;
  claims_.push_back(record);
  return absl::OkStatus();
}

size_t RecordFile::claim_count() const {
  const MutexLock lock(mutex_);
  return claims_.size();
}

void RecordFile::Unclaim(size_t count) {
  const MutexLock lock(mutex_);
  for (; claims_.size() > count; claims_.pop_back()) claimed_[claims_.back()] = false;
}

absl::StatusOr<RecordIndex> RecordFile::ClaimNext(RecordIndex record) {
  const std::optional<uint64_t> next = At(record).next.Load(Record::kNextSalt);
  if (!next) return Damaged(record, "the number of the next record is damaged");
  if (*next == 0) return Damaged(record, "its chain ends too early");
  const auto index = static_cast<RecordIndex>(*next);
  RETURN_IF_ERROR(Claim(index));
  // A kind that was damaged is not needed here.
  At(index).kind.store(static_cast<uint32_t>(RecordKind::kPart), std::memory_order_relaxed);
  return index;
}

uint64_t RecordText::Sum() const {
  return Checksum({reinterpret_cast<const char*>(this), offsetof(RecordText, sum)}, 0);
}

uint64_t RecordRoot::Sum(RecordKind kind) const {
  return Checksum({reinterpret_cast<const char*>(this), offsetof(RecordRoot, sum)},
                  static_cast<uint64_t>(kind));
}

absl::Status RecordFile::ClaimRoot(RecordIndex record, RecordKind kind) {
  const auto& root = Payload<RecordRoot>(record);
  if (root.sum != root.Sum(kind)) return Damaged(record, "its checksum is wrong");
  return Claim(record);
}

std::string RecordFile::DescriptionOf(RecordIndex record) const {
  const RecordText text = Payload<RecordRoot>(record).description;
  if (text.sum != text.Sum()) return "";
  std::string bytes;
  std::optional<uint64_t> next = text.first;
  while (bytes.size() < text.byte_count && next && IsRecord(*next)) {
    const Record& part = At(static_cast<RecordIndex>(*next));
    bytes.append(reinterpret_cast<const char*>(part.payload),
                 std::min(sizeof(part.payload), text.byte_count - bytes.size()));
    next = part.next.Load(Record::kNextSalt);
  }
  return Checksum(bytes, 0) == text.text_sum ? bytes : "";
}

void RecordFile::FreeUnclaimed() {
  const MutexLock lock(mutex_);
  claims_ = {};
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
  record.unused = 0;
  record.next.Store(0, Record::kNextSalt);
  record.kind.store(static_cast<uint32_t>(RecordKind::kPart), std::memory_order_relaxed);
  return index;
}

void RecordFile::Free(RecordIndex record) {
  At(record).kind.store(static_cast<uint32_t>(RecordKind::kFree), std::memory_order_relaxed);
  const MutexLock lock(mutex_);
  claimed_[record] = false;
  free_.push_back(record);
}

void RecordFile::FreeChain(RecordIndex record) {
  while (record != 0) {
    const auto next = static_cast<RecordIndex>(At(record).next.value());
    Free(record);
    record = next;
  }
}

absl::StatusOr<RecordText> RecordFile::WriteText(std::string_view bytes) {
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
    record.next.Store(first, Record::kNextSalt);
    first = *index;
  }
  RecordText text{first, bytes.size(), Checksum(bytes, 0)};
  text.sum = text.Sum();
  return text;
}

absl::StatusOr<std::string> RecordFile::ReadText(const RecordText& text) {
  constexpr size_t kPart = sizeof(Record::payload);
  if (text.sum != text.Sum()) return absl::DataLossError("the place of a text is damaged");
  std::string bytes;
  auto part = static_cast<RecordIndex>(text.first);
  RETURN_IF_ERROR(Claim(part));
  for (;;) {
    const size_t left = text.byte_count - bytes.size();
    bytes.append(reinterpret_cast<const char*>(At(part).payload), std::min(left, kPart));
    if (left <= kPart) break;
    ASSIGN_OR_RETURN(part, ClaimNext(part));
  }
  // Cut the chain, because the records that follow were not claimed.
  At(part).next.Store(0, Record::kNextSalt);
  if (Checksum(bytes, 0) != text.text_sum) {
    return Damaged(static_cast<RecordIndex>(text.first), "the text that begins here is damaged");
  }
  return bytes;
}

}  // namespace spillway

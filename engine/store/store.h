#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "host/memory/arena_file.h"
#include "host/memory/arena_folder.h"
#include "host/memory/record_file.h"

namespace spillway {

// The folder in memory in which rows outlive the process. The file `rows` has the pages of rows of
// an arena; the file `records` says to which models, sequences and positions they belong.
// Thread-safe if its parts are.
class Store {
 public:
  // Locks the folder, and creates missing files. Errors as ArenaFolder::Open and RecordFile::Open.
  static absl::StatusOr<std::unique_ptr<Store>> Open(const std::string& path, MemoryBudget* budget);

  const std::string& path() const { return folder_.path(); }
  // Stays the same as long as the files of the folder exist.
  const std::string& identity() const { return records_->identity(); }
  RecordFile& records() { return *records_; }
  // For the arena; called once.
  std::unique_ptr<ArenaFile> TakeRows() { return std::move(rows_); }
  // Size of the file `rows` when it was opened. Rows may be anywhere in it.
  int64_t rows_bytes() const { return rows_bytes_; }

 private:
  Store(ArenaFolder folder, std::unique_ptr<ArenaFile> rows, int64_t rows_bytes,
        std::unique_ptr<RecordFile> records)
      : folder_(std::move(folder)),
        rows_(std::move(rows)),
        rows_bytes_(rows_bytes),
        records_(std::move(records)) {}

  const ArenaFolder folder_;
  std::unique_ptr<ArenaFile> rows_;
  const int64_t rows_bytes_;
  const std::unique_ptr<RecordFile> records_;
};

}  // namespace spillway

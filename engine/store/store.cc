#include "engine/store/store.h"

#include "host/base/status_macros.h"

namespace spillway {

absl::StatusOr<std::unique_ptr<Store>> Store::Open(const std::string& path, MemoryBudget* budget) {
  ASSIGN_OR_RETURN(ArenaFolder folder, ArenaFolder::Open(path));
  ASSIGN_OR_RETURN(std::unique_ptr<ArenaFile> rows, ArenaFile::Open(folder, "rows"));
  ASSIGN_OR_RETURN(const int64_t rows_bytes, rows->size_bytes());
  ASSIGN_OR_RETURN(std::unique_ptr<ArenaFile> file, ArenaFile::Open(folder, "records"));
  ASSIGN_OR_RETURN(const uint64_t rows_number, rows->number());
  ASSIGN_OR_RETURN(std::unique_ptr<RecordFile> records,
                   RecordFile::Open(std::move(file), rows_number, budget));
  return std::unique_ptr<Store>(
      new Store(std::move(folder), std::move(rows), rows_bytes, std::move(records)));
}

}  // namespace spillway

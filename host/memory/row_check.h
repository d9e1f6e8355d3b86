#pragma once

#include <cstdint>
#include <vector>

#include "host/memory/layer_rows.h"

namespace spillway {

// Compares the rows that an earlier process left with their checksums. All layers have pages of one
// pool. A full page that several sequences share is read once. Not thread-safe.
class RowCheck {
 public:
  // Adds a layer whose rows were adopted up to token_count. All must be added before Run().
  void Add(const LayerRows& rows, int64_t token_count);
  // Reads all full pages of the layers, in parallel.
  void Run();

  // Where damage begins in a layer that was added: the start of a page, or token_count if there is
  // no damage. If a device wrote the record's length, rows after LayerRecord::summed() have no
  // checksum.
  struct Intact {
    int64_t token_count = 0;
    int kv_head = -1;  // of the damaged page; -1: all of them, or none
  };
  Intact Find(const LayerRows& rows, const LayerRecord& record, int64_t token_count) const;

  int64_t page_count() const { return static_cast<int64_t>(pages_.size()); }

 private:
  struct Page {
    const LayerRows* rows;
    int64_t page;
    int kv_head;
  };

  std::vector<bool> known_;     // by page index
  std::vector<Page> pages_;     // each page index once
  std::vector<uint64_t> sums_;  // by page index
};

}  // namespace spillway

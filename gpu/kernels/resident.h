#pragma once

#include <cstddef>
#include <cstdint>

#include "host/base/limits.h"

// Rows that are in GPU memory too, as kernels see them.
namespace spillway::cuda {

// Which tokens of a page are in the GPU's sink or resident sample, and how many before the page.
struct ResidentPage {
  uint32_t mask[kPageTokenCount / 32];
  uint32_t before;
  uint32_t unused;
};
// Rows of a page of ResidentRows::row_pages.
inline constexpr int kResidentPageRows = 64;
// The number of first tokens whose rows the GPU always holds.
inline constexpr int kResidentSink = 64;
// Rows of the ring of the newest tokens; the row of a token is at token % kRecentRows.
inline constexpr int kRecentRows = 128;

// Rows of one KV head that are in GPU memory. Null `pages`: no sink and no resident sample.
struct ResidentRows {
  const ResidentPage* pages;          // one for each page with indexed tokens
  const std::byte* const* row_pages;  // kResidentPageRows rows each, in token order
  int64_t sink;                       // tokens [0, sink) are all on the GPU
  const std::byte* recent;            // ring [kRecentRows] of rows
  int64_t recent_begin;               // tokens from here on are in the ring
  // Tokens [0, whole_end) are all on the GPU, whatever the other fields say: page p is at
  // whole_pages[p].
  const std::byte* const* whole_pages;
  int64_t whole_end;
};

}  // namespace spillway::cuda

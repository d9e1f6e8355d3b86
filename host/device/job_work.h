#pragma once

#include <cstdint>

#include "host/device/device.h"

namespace spillway {

// Bytes of rows that a job may read and write: the rows visible to each query, and those appended.
int64_t RowBytes(const Job& job);

// How much work a job is for a CPU, to compare jobs: about the bytes of rows that it reads, counted
// once for each query. A sparse query reads its index (index_token_bytes per token, see
// Device::IndexBytesPerToken()) and as many rows as its policy allows; if that sets no limit, a
// quarter of the visible rows, or sink, window and heavy set if they are more. Appending and
// indexing a row counts as reading kIndexedRowReads rows, which is about the processor time that it
// takes.
int64_t WorkOf(const Job& job, int64_t index_token_bytes);

inline constexpr int64_t kIndexedRowReads = 24;

}  // namespace spillway

#pragma once

#include <cstdint>

#include "host/device/device.h"

namespace spillway {

// Bytes of rows that a job could read and write: those visible to every query, and those appended.
int64_t RowBytes(const Job& job);

// How much work a job is for a CPU, to compare jobs: about the bytes of rows that it reads, once
// for every query that reads them. A sparse query reads its index (index_token_bytes a token, see
// Device::IndexBytesPerToken()) and rows as far as its policy lets it; where that sets no limit, a
// quarter of them. To append and index a row counts as to read kIndexedRowReads, which is about the
// processor time that it takes.
int64_t WorkOf(const Job& job, int64_t index_token_bytes);

inline constexpr int64_t kIndexedRowReads = 24;

}  // namespace spillway

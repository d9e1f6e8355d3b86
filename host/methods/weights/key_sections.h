#pragma once

#include <cstdint>

#include "host/base/host_device.h"
#include "host/base/limits.h"
#include "host/model/model_spec.h"

namespace spillway {

// The sections of the optional methods in an index page, which covers kPageTokenCount tokens of one
// KV head. They follow the codes, one after the other, with the same bytes on every device; see
// KeyIndexSpec. Word w of token t is at [w][t].
//   int4     uint32 [d / 8 + 1][128]: eight elements of 4 bits per word, the
//            first in the lowest bits; the last word is Int4Range::Pack()
//   labels   the same for the label channels, with their own range
//   bounds   dtype [2][d][128 / quest_page_token_count]: the smallest and the
//            largest elements of the keys of each of Quest's pages
//   buckets  uint16 [lsh_table_count][128]: bit b of table t is 1 if
//            projection t lsh_bits + b of the centred key is > 0
// Plain data for host and device code.
struct KeySections {
  int head_dim = 0;
  int element_bytes = 0;
  int int4_channels = 0;  // d, or 0
  int label_channels = 0;
  int bound_pages = 0;  // Quest's pages per index page, or 0
  int tables = 0;

  static KeySections Of(const ModelSpec& spec) {
    KeySections s;
    s.head_dim = spec.head_dim;
    s.element_bytes = DTypeBytes(spec.dtype);
    s.int4_channels = spec.indices.int4_keys ? spec.head_dim : 0;
    s.label_channels = spec.indices.label_channel_count;
    const int page = spec.indices.quest_page_token_count;
    s.bound_pages = page > 0 ? static_cast<int>(kPageTokenCount / page) : 0;
    s.tables = spec.indices.lsh_table_count;
    return s;
  }

  SPILLWAY_HOST_DEVICE static int64_t Int4Bytes(int channels) {
    return channels > 0 ? (channels / 8 + 1) * kPageTokenCount * 4 : 0;
  }
  // Bits per key: elements of 4 bits, and their range.
  static constexpr int64_t Int4KeyBits(int channels) { return int64_t{4} * channels + 32; }
  // Offsets in bytes from the beginning of the sections.
  SPILLWAY_HOST_DEVICE int64_t int4_keys() const { return 0; }
  SPILLWAY_HOST_DEVICE int64_t labels() const { return Int4Bytes(int4_channels); }
  SPILLWAY_HOST_DEVICE int64_t bounds() const { return labels() + Int4Bytes(label_channels); }
  SPILLWAY_HOST_DEVICE int64_t buckets() const {
    return bounds() + int64_t{2} * head_dim * bound_pages * element_bytes;
  }
  SPILLWAY_HOST_DEVICE int64_t bytes() const {
    return buckets() + int64_t{tables} * kPageTokenCount * 2;
  }
  SPILLWAY_HOST_DEVICE int64_t bound_page_tokens() const { return kPageTokenCount / bound_pages; }

  bool operator==(const KeySections&) const = default;
};

}  // namespace spillway

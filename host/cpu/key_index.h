#pragma once

#include <cstddef>
#include <cstdint>

namespace spillway {

// New keys of a layer, in one page of one KV head.
struct PageKeys {
  int layer = 0;
  int kv_head = 0;
  const std::byte* rows = nullptr;  // the page's first row; the keys before `begin` are there too
  int begin = 0;                    // keys [begin, end) of the page, begin < end <= kPageTokenCount
  int end = 0;
  const float* centre = nullptr;  // [d]
};

// The data of an optional method for one model: its weights, and the code that fills its section of
// the index pages. Thread-safe.
class KeyIndex {
 public:
  virtual ~KeyIndex() = default;
  // Bytes of host memory that it holds.
  virtual int64_t bytes() const = 0;
  // Writes the keys to the method's section of their index page.
  virtual void Encode(const PageKeys& keys, std::byte* section) const = 0;
};

}  // namespace spillway

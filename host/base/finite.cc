#include "host/base/finite.h"

#include <algorithm>
#include <cstring>

namespace spillway {
namespace {

// Elements that are tested before the result is looked at. The fixed trip count lets the compiler
// vectorise the loop without a remainder.
constexpr int64_t kBlock = 1024;

// An element is infinite or NaN exactly if all of its exponent bits are set.
template <typename Word, Word kExponent>
bool IsNonFinite(const std::byte* p) {
  Word word;
  std::memcpy(&word, p, sizeof(word));
  return (word & kExponent) == kExponent;
}

template <typename Word, Word kExponent>
bool BlockHasNonFinite(const std::byte* p) {
  Word found = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    Word word;
    std::memcpy(&word, p + i * sizeof(Word), sizeof(word));
    found = static_cast<Word>(found | ((word & kExponent) == kExponent));
  }
  return found != 0;
}

template <typename Word, Word kExponent>
std::optional<int64_t> Find(std::span<const std::byte> data) {
  const int64_t count = static_cast<int64_t>(data.size() / sizeof(Word));
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    if (end - begin == kBlock &&
        !BlockHasNonFinite<Word, kExponent>(data.data() + begin * sizeof(Word))) {
      continue;
    }
    for (int64_t i = begin; i < end; ++i) {
      if (IsNonFinite<Word, kExponent>(data.data() + i * sizeof(Word))) return i;
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<int64_t> FindNonFinite(std::span<const std::byte> data, DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return Find<uint32_t, 0x7f800000>(data);
    case DType::kF16:
      return Find<uint16_t, 0x7c00>(data);
    case DType::kBF16:
      return Find<uint16_t, 0x7f80>(data);
  }
  return std::nullopt;
}

}  // namespace spillway

#include "cli/random_rows.h"

#include <bit>
#include <cstring>

#include "host/base/half.h"
#include "spillway/tensor.h"

namespace spillway::cli {
namespace {

// Bits of a finite float in bfloat16, rounded to nearest even.
uint32_t ToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

uint32_t ToBits(float value, v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_BF16:
      return ToBf16(value);
    case v1::DTYPE_F16:
      return HalfFromFloat(value);
    default:
      return std::bit_cast<uint32_t>(value);
  }
}

}  // namespace

RandomRows::RandomRows(v1::DType dtype, double stddev, uint64_t seed)
    : dtype_(dtype), random_(seed) {
  std::normal_distribution<float> normal(0, 1);
  for (uint32_t& entry : table_) {
    entry = ToBits(static_cast<float>(stddev) * normal(random_), dtype);
  }
}

template <typename Word>
void RandomRows::Fill(std::string& bytes) {
  uint64_t pool = 0;
  for (size_t at = 0; at < bytes.size(); at += sizeof(Word)) {
    if (at / sizeof(Word) % 4 == 0) pool = random_();
    const Word word = static_cast<Word>(table_[pool & 0xffff]);
    pool >>= 16;
    std::memcpy(&bytes[at], &word, sizeof(Word));
  }
}

std::string RandomRows::Draw(size_t element_count) {
  std::string bytes(element_count * DTypeBytes(dtype_), '\0');
  if (dtype_ == v1::DTYPE_F32) {
    Fill<uint32_t>(bytes);
  } else {
    Fill<uint16_t>(bytes);
  }
  return bytes;
}

}  // namespace spillway::cli

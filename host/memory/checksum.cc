#include "host/memory/checksum.h"

#include <cassert>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace spillway {
namespace {

constexpr int kValueBits = 40;

}  // namespace

uint64_t Checksum(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

uint64_t Checksum(std::string_view text, uint64_t salt) {
  return XXH3_64bits_withSeed(text.data(), text.size(), salt);
}

uint64_t Checksum(uint64_t word, uint64_t salt) {
  return XXH3_64bits_withSeed(&word, sizeof(word), salt);
}

uint64_t CheckedWord::Encode(uint64_t value, uint64_t salt) {
  assert(value <= kMax);
  return value | Checksum(value, salt) << kValueBits;
}

std::optional<uint64_t> CheckedWord::Load(uint64_t salt) const {
  const uint64_t word = word_.load(std::memory_order_acquire);
  const uint64_t value = word & kMax;
  if (word != Encode(value, salt)) return std::nullopt;
  return value;
}

}  // namespace spillway

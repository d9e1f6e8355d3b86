#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace spillway {

// Checksum of bytes in memory (XXH3). It finds damage, but not forgery. All builds compute the
// same. A text and a word are summed as their bytes, with a salt that tells where they belong.
uint64_t Checksum(std::span<const std::byte> bytes);
uint64_t Checksum(std::string_view text, uint64_t salt);
uint64_t Checksum(uint64_t word, uint64_t salt);

// A number in a file that another process may find after this one was killed, and after damage: 40
// bits, and 24 bits of their checksum, in one word. So a single store changes it, and the number is
// right at any moment. The salt tells where the number belongs: what is read elsewhere is damaged.
// Thread-safe.
class CheckedWord {
 public:
  static constexpr uint64_t kMax = (uint64_t{1} << 40) - 1;

  // The word for a number, for others than Store() to write. REQUIRES: value <= kMax.
  static uint64_t Encode(uint64_t value, uint64_t salt);

  // Readers that see the number also see all that was written before.
  void Store(uint64_t value, uint64_t salt) {
    word_.store(Encode(value, salt), std::memory_order_release);
  }
  // Makes the word damaged.
  void Clear() { word_.store(0, std::memory_order_release); }
  // The number; nothing if the word is damaged.
  std::optional<uint64_t> Load(uint64_t salt) const;
  // The number of a word that was checked before.
  uint64_t value() const { return word_.load(std::memory_order_acquire) & kMax; }

  std::atomic<uint64_t>& word() { return word_; }

 private:
  std::atomic<uint64_t> word_;
};
static_assert(sizeof(CheckedWord) == sizeof(uint64_t) &&
              std::atomic<uint64_t>::is_always_lock_free);

}  // namespace spillway

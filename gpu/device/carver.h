#pragma once

#include <cstddef>
#include <cstdint>

namespace spillway::cuda {

// Cuts aligned pieces from a block of memory. With a null base it only measures.
class Carver {
 public:
  explicit Carver(std::byte* base = nullptr) : base_(base) {}
  template <typename T>
  T* Take(int64_t count) {
    constexpr int64_t kAlignment = 256;
    const int64_t at = bytes_;
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  int64_t bytes_ = 0;
};

}  // namespace spillway::cuda

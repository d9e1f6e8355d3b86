#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "gpu/kernels/encode.h"
#include "host/base/elements.h"
#include "tests/gpu/device_array.h"

// A layer whose keys are encoded on the GPU, and access to its codes.
namespace spillway::cuda {

inline constexpr std::byte kPoison{0xCD};

inline bool HasGpu() {
  int count = 0;
  const bool found = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  if (!found) cudaGetLastError();
  return found;
}

#define SKIP_WITHOUT_GPU() \
  if (!HasGpu()) GTEST_SKIP() << "this machine has no CUDA GPU"

inline std::vector<float> Normals(size_t count, double scale, std::mt19937& random) {
  std::normal_distribution<float> normal(0, static_cast<float>(scale));
  std::vector<float> values(count);
  for (float& x : values) x = normal(random);
  return values;
}

// The rows of a layer, and memory for its codes. Its pages are in random order.
class Layer {
 public:
  Layer(int heads, int d, DType dtype, int64_t token_count, const CodeTiling& tiling)
      : heads_(heads),
        d_(d),
        dtype_(dtype),
        pages_((token_count + kPageTokenCount - 1) / kPageTokenCount),
        tiling_(tiling),
        place_of_(heads * pages_),
        rows_(heads * pages_ * page_bytes(), std::byte{0x7F}),
        centre_(heads * d) {
    std::iota(place_of_.begin(), place_of_.end(), int64_t{0});
    std::shuffle(place_of_.begin(), place_of_.end(), std::mt19937(d));
  }

  int64_t row_bytes() const { return int64_t{2} * d_ * DTypeBytes(dtype_); }
  int64_t page_bytes() const { return row_bytes() * kPageTokenCount; }
  const std::byte* Row(int head, int64_t token) const {
    return rows_.data() + place_of_[head * pages_ + token / kPageTokenCount] * page_bytes() +
           token % kPageTokenCount * row_bytes();
  }
  void SetKey(int head, int64_t token, const std::vector<float>& key) {
    FromFloat(dtype_, key.data(), d_, const_cast<std::byte*>(Row(head, token)));
  }
  void SetValue(int head, int64_t token, const std::vector<float>& value) {
    FromFloat(dtype_, value.data(), d_, const_cast<std::byte*>(Row(head, token)) + row_bytes() / 2);
  }
  // As stored in the row: rounded to the layer's dtype.
  std::vector<float> Key(int head, int64_t token) const { return Read(Row(head, token)); }
  std::vector<float> Value(int head, int64_t token) const {
    return Read(Row(head, token) + row_bytes() / 2);
  }
  float* Centre(int head) { return centre_.data() + head * d_; }

  // Copies everything to memory that kernels can read; codes are poison.
  void Upload(Place rows = Place::kGpu) {
    device_rows_ = std::make_unique<DeviceArray<std::byte>>(rows_, rows);
    device_centre_ = std::make_unique<DeviceArray<float>>(centre_);
    device_codes_ = std::make_unique<DeviceArray<std::byte>>(
        std::vector<std::byte>(place_of_.size() * tiling_.page_bytes(), kPoison));
    std::vector<const std::byte*> row_pages;
    std::vector<std::byte*> code_pages;
    for (const int64_t place : place_of_) {
      row_pages.push_back(device_rows_->data() + place * page_bytes());
      code_pages.push_back(device_codes_->data() + place * tiling_.page_bytes());
    }
    row_pages_ = std::make_unique<DeviceArray<const std::byte*>>(row_pages);
    code_pages_ = std::make_unique<DeviceArray<std::byte*>>(code_pages);
  }
  EncodeWork Work(int64_t begin, int64_t end) const {
    EncodeWork work;
    work.dtype = dtype_;
    work.head_dim = d_;
    work.kv_head_count = heads_;
    work.row_bytes = row_bytes();
    work.begin = begin;
    work.end = end;
    work.row_pages = row_pages_->data();
    work.row_page_capacity = pages_;
    work.code_pages = code_pages_->data();
    work.code_page_capacity = pages_;
    work.tiling = tiling_;
    work.centre = device_centre_->data();
    return work;
  }
  std::vector<float> FetchCentre() const { return device_centre_->Fetch(); }

  // Code pages as the kernels left them, [head][page].
  std::vector<std::vector<std::byte>> FetchCodes() const {
    const std::vector<std::byte> all = device_codes_->Fetch();
    std::vector<std::vector<std::byte>> pages;
    for (const int64_t place : place_of_) {
      const auto first = all.begin() + place * tiling_.page_bytes();
      pages.emplace_back(first, first + tiling_.page_bytes());
    }
    return pages;
  }

  int64_t pages() const { return pages_; }
  const CodeTiling& tiling() const { return tiling_; }

 private:
  std::vector<float> Read(const std::byte* vector) const {
    std::vector<float> elements(d_);
    ToFloat(dtype_, vector, d_, elements.data());
    return elements;
  }

  const int heads_;
  const int d_;
  const DType dtype_;
  const int64_t pages_;  // pages per head
  const CodeTiling tiling_;
  std::vector<int64_t> place_of_;  // position of page p of head h, in pages
  std::vector<std::byte> rows_;
  std::vector<float> centre_;
  std::unique_ptr<DeviceArray<std::byte>> device_rows_, device_codes_;
  std::unique_ptr<DeviceArray<float>> device_centre_;
  std::unique_ptr<DeviceArray<const std::byte*>> row_pages_;
  std::unique_ptr<DeviceArray<std::byte*>> code_pages_;
};

// The code of one token, by the description of CodeTiling only: planes are uint32
// [plane][tile][fragment][row][word][octet], followed by factors and norms [tile][row][octet].
class TokenCode {
 public:
  TokenCode(const CodeTiling& tiling, std::vector<std::byte>& page, int slot)
      : tiling_(tiling), page_(page), slot_(slot) {}

  bool Bit(int plane, int j) const { return Word(plane, j / 32) >> (j % 32) & 1; }
  int Level(int j) const {
    int level = 0;
    for (int plane = 0; plane < tiling_.planes; ++plane) level |= Bit(plane, j) << plane;
    return level;
  }
  uint16_t Factor() const {
    uint16_t f;
    std::memcpy(&f, FactorAddress(), 2);
    return f;
  }
  uint8_t Norm() const { return static_cast<uint8_t>(*NormAddress()); }
  // Poisons the token's words, factor and norm.
  void Poison() {
    for (int plane = 0; plane < tiling_.planes; ++plane) {
      for (int word = 0; word < tiling_.words; ++word) {
        std::fill_n(WordAddress(plane, word), 4, kPoison);
      }
    }
    if (tiling_.centre_dims == 0) return;
    std::fill_n(FactorAddress(), 2, kPoison);
    *NormAddress() = kPoison;
  }

 private:
  std::byte* WordAddress(int plane, int word) const {
    const int fragment = word / 4;
    const int fragment_words = std::min(4, tiling_.words - fragment * 4);
    const int tile = slot_ / 32, octet = slot_ % 32 / 8, row = slot_ % 8;
    const int before = (plane * 4 + tile) * tiling_.words * 32 + fragment * 4 * 32;
    return page_.data() + 4 * (before + (row * fragment_words + word % 4) * 4 + octet);
  }
  std::byte* FactorAddress() const { return BehindPlanes() + 2 * Place(); }
  std::byte* NormAddress() const { return BehindPlanes() + 128 * 2 + Place(); }
  std::byte* BehindPlanes() const {
    return page_.data() + tiling_.planes * tiling_.words * 128 * 4;
  }
  int Place() const { return slot_ / 32 * 32 + slot_ % 8 * 4 + slot_ % 32 / 8; }
  uint32_t Word(int plane, int word) const {
    uint32_t w;
    std::memcpy(&w, WordAddress(plane, word), 4);
    return w;
  }

  const CodeTiling& tiling_;
  std::vector<std::byte>& page_;
  const int slot_;
};

// The centre of a page, bf16 [d], after the factors and norms.
inline std::byte* CentreAddress(const CodeTiling& tiling, std::vector<std::byte>& page) {
  return page.data() + tiling.planes * tiling.words * 128 * 4 + 128 * 2 + 128;
}

// Expects that only the codes of tokens [begin, end) were written, and the centres of the pages
// that are wholly in this range.
inline void ExpectPoisonOutside(std::vector<std::vector<std::byte>> pages, const Layer& layer,
                                int64_t begin, int64_t end) {
  for (size_t i = 0; i < pages.size(); ++i) {
    const int64_t first = static_cast<int64_t>(i) % layer.pages() * kPageTokenCount;
    for (int slot = 0; slot < kPageTokenCount; ++slot) {
      if (first + slot < begin || first + slot >= end) continue;
      TokenCode(layer.tiling(), pages[i], slot).Poison();
    }
    if (first >= begin && first + kPageTokenCount <= end) {
      std::fill_n(CentreAddress(layer.tiling(), pages[i]), 2 * layer.tiling().centre_dims, kPoison);
    }
    const auto written =
        std::find_if(pages[i].begin(), pages[i].end(), [](std::byte b) { return b != kPoison; });
    ASSERT_EQ(written - pages[i].begin(), static_cast<int64_t>(pages[i].size()))
        << "a byte of no token in [" << begin << ", " << end << ") was written, head "
        << i / layer.pages() << " page " << i % layer.pages();
  }
}

}  // namespace spillway::cuda

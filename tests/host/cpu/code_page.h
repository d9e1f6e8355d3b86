#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "host/base/elements.h"
#include "host/codes/rotation.h"
#include "host/cpu/kernels.h"
#include "tests/reference/codes.h"

namespace spillway {

// The layout of the codes of a rotation.
inline CodeLayout RotationLayout(int d, int bits) {
  ModelSpec spec;
  spec.head_dim = d;
  spec.hash = {.kind = HashKind::kRotation, .bits_per_dim = bits};
  return CodeLayout::Of(spec);
}

// A code page that is read and built by the description of its layout only.
class CodePage {
 public:
  explicit CodePage(const CodeLayout& layout)
      : layout_(layout), bytes_(layout.page_bytes(), std::byte{0}) {}

  std::byte* data() { return bytes_.data(); }
  const std::vector<std::byte>& bytes() const { return bytes_; }

  int Level(int slot, int dimension) const {
    int level = 0;
    for (int p = 0, low = 0; p < layout_.parts; low += layout_.width[p++]) {
      const auto [word, shift] = Field(p, slot, dimension);
      level |= static_cast<int>((*word >> shift) & Mask(p)) << low;
    }
    return level;
  }
  void SetLevel(int slot, int dimension, int level) {
    for (int p = 0, low = 0; p < layout_.parts; low += layout_.width[p++]) {
      const auto [word, shift] = Field(p, slot, dimension);
      uint32_t& target = *const_cast<uint32_t*>(word);
      target = (target & ~(Mask(p) << shift)) | ((static_cast<uint32_t>(level) >> low) & Mask(p))
                                                    << shift;
    }
  }
  float Factor(int slot) const {
    float f;
    ToFloat(DType::kBF16, bytes_.data() + layout_.factor_offset_bytes() + 2 * slot, 1, &f);
    return f;
  }
  void SetFactor(int slot, float f) {
    FromFloat(DType::kBF16, &f, 1, bytes_.data() + layout_.factor_offset_bytes() + 2 * slot);
  }

 private:
  uint32_t Mask(int part) const { return (1u << layout_.width[part]) - 1; }
  // Parts are uint32 [tile = 8][part][word][lane = 16]. A word has 32 / width dimensions; its
  // dimension 4 i + b is field i of byte b.
  std::pair<const uint32_t*, int> Field(int part, int slot, int dimension) const {
    const int width = layout_.width[part];
    const int dims = 32 / width;  // per word
    const int first = part == 0 ? 0 : layout_.dims * layout_.width[0] / 32;
    const int words_of_tile = layout_.dims * (layout_.width[0] + layout_.width[1]) / 32;
    const auto* words = reinterpret_cast<const uint32_t*>(bytes_.data());
    const int in_word = dimension % dims;
    return {words + ((slot / 16) * words_of_tile + first + dimension / dims) * 16 + slot % 16,
            8 * (in_word % 4) + width * (in_word / 4)};
  }

  CodeLayout layout_;
  std::vector<std::byte> bytes_;
};

// The rotation and the encoder parameters of one head.
struct Encoder {
  std::vector<float> rotation;
  std::vector<float> transposed;
  std::vector<float> centre;
  EncodeParams params;

  Encoder(int d, int bits, uint64_t seed) : rotation(MakeRotation(d, seed, 0)), centre(d) {
    transposed.resize(rotation.size());
    for (int i = 0; i < d; ++i) {
      for (int j = 0; j < d; ++j) transposed[i * d + j] = rotation[j * d + i];
    }
    params.head_dim = d;
    params.bits_per_dim = bits;
    params.layout = RotationLayout(d, bits);
    params.rotation = rotation.data();
    params.rotation_transposed = transposed.data();
    params.centre = centre.data();
  }
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;
};

}  // namespace spillway

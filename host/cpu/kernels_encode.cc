// Encoding of keys: rotation, quantisation and the factor of `asymmetric` codes (as in RaBitQ,
// SIGMOD 2024). fp32 in one fixed order.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "host/core/quantiser.h"
#include "host/core/value_code.h"
#include "host/cpu/kernels.h"

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#define HWY_WANT_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "host/cpu/kernels_encode.cc"
#include "hwy/foreach_target.h"
//
#include "host/base/elements-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spillway {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D16 = hn::CappedTag<float, kTileTokenCount>;

// y_j is one chain of fused multiply-adds over i of P[j][i] x_i. Lanes are j.
void RotateImpl(const EncodeParams& p, const float* x, float* y) {
  const D16 d;
  const int n = static_cast<int>(hn::Lanes(d));
  const int dim = p.head_dim;
  int j = 0;
  for (; j + 4 * n <= dim; j += 4 * n) {
    auto a0 = hn::Zero(d), a1 = hn::Zero(d), a2 = hn::Zero(d), a3 = hn::Zero(d);
    for (int i = 0; i < dim; ++i) {
      const float* row = p.rotation_transposed + static_cast<size_t>(i) * dim + j;
      const auto xi = hn::Set(d, x[i]);
      a0 = hn::MulAdd(hn::LoadU(d, row), xi, a0);
      a1 = hn::MulAdd(hn::LoadU(d, row + n), xi, a1);
      a2 = hn::MulAdd(hn::LoadU(d, row + 2 * n), xi, a2);
      a3 = hn::MulAdd(hn::LoadU(d, row + 3 * n), xi, a3);
    }
    hn::StoreU(a0, d, y + j);
    hn::StoreU(a1, d, y + j + n);
    hn::StoreU(a2, d, y + j + 2 * n);
    hn::StoreU(a3, d, y + j + 3 * n);
  }
  for (; j < dim; j += n) {
    auto a = hn::Zero(d);
    for (int i = 0; i < dim; ++i) {
      a = hn::MulAdd(hn::LoadU(d, p.rotation_transposed + static_cast<size_t>(i) * dim + j),
                     hn::Set(d, x[i]), a);
    }
    hn::StoreU(a, d, y + j);
  }
}

// From here on, lanes are keys. Divides the differences x [dim][16] of the lanes' vectors by their
// norms, and returns the norms: RadiusOf(), in its order of operations.
HWY_INLINE hn::Vec<D16> Normalise(int dim, int lane, float* HWY_RESTRICT x) {
  const D16 d;
  const auto zero = hn::Zero(d);
  const auto one = hn::Set(d, 1.0f);
  auto largest = zero;
  for (int i = 0; i < dim; ++i) {
    largest = hn::Max(largest, hn::Abs(hn::Load(d, x + i * kTileTokenCount + lane)));
  }
  const auto present = hn::Gt(largest, zero);
  const auto safe = hn::IfThenElse(present, largest, one);
  auto norm_sq = zero;
  for (int i = 0; i < dim; ++i) {
    const auto r = hn::Div(hn::Load(d, x + i * kTileTokenCount + lane), safe);
    hn::Store(r, d, x + i * kTileTokenCount + lane);
    norm_sq = hn::MulAdd(r, r, norm_sq);
  }
  const auto norm = hn::Sqrt(hn::IfThenElse(present, norm_sq, one));
  const auto inverse = hn::Div(one, norm);
  for (int i = 0; i < dim; ++i) {
    float* o = x + i * kTileTokenCount + lane;
    hn::Store(hn::Mul(hn::Load(d, o), inverse), d, o);
  }
  return hn::Mul(largest, norm);
}

// x [dim][16] = the differences of 16 vectors from a centre.
void LoadDifferences(DType dtype, const std::byte* vectors, int64_t row_bytes, int dim,
                     const float* centre, float* HWY_RESTRICT x) {
  float vector[kHeadDimMax];
  for (int t = 0; t < kTileTokenCount; ++t) {
    ToFloatImpl(dtype, vectors + t * row_bytes, dim, vector);
    for (int i = 0; i < dim; ++i) x[i * kTileTokenCount + t] = vector[i] - centre[i];
  }
}

void DistancesImpl(DType dtype, const std::byte* vectors, int64_t row_bytes, int count, int dim,
                   const float* centre, float* distances) {
  const D16 d;
  const int n = static_cast<int>(hn::Lanes(d));
  HWY_ALIGN float x[kHeadDimMax * kTileTokenCount];
  for (int first = 0; first < count; first += kTileTokenCount) {
    LoadDifferences(dtype, vectors + first * row_bytes, row_bytes, dim, centre, x);
    for (int lane = 0; lane < kTileTokenCount; lane += n) {
      hn::StoreU(Normalise(dim, lane, x), d, distances + first + lane);
    }
  }
}

// Encodes the keys of a tile. x [dim][16] holds k - c, then o = (k - c) / ||k - c||; y [dim][16] is
// P o.
void EncodeLanes(const EncodeParams& p, float* HWY_RESTRICT x, float* HWY_RESTRICT y,
                 std::byte* page, int tile) {
  const D16 d;
  const hn::RebindToUnsigned<D16> du;
  const hn::RebindToSigned<D16> di;
  const int n = static_cast<int>(hn::Lanes(d));
  const int dim = p.head_dim;
  const int levels = 1 << p.bits_per_dim;
  const float step = QuantiserStep(p.bits_per_dim);
  const auto scale = hn::Set(d, std::sqrt(static_cast<float>(dim)) / step);
  const auto zero = hn::Zero(d);
  const auto one = hn::Set(d, 1.0f);
  for (int lane = 0; lane < kTileTokenCount; lane += n) {
    const auto length = Normalise(dim, lane, x);
    for (int j = 0; j < dim; j += 4) {
      const float* row = p.rotation + static_cast<size_t>(j) * dim;
      auto a0 = zero, a1 = zero, a2 = zero, a3 = zero;
      for (int i = 0; i < dim; ++i) {
        const auto o = hn::Load(d, x + i * kTileTokenCount + lane);
        a0 = hn::MulAdd(hn::Set(d, row[i]), o, a0);
        a1 = hn::MulAdd(hn::Set(d, row[dim + i]), o, a1);
        a2 = hn::MulAdd(hn::Set(d, row[2 * dim + i]), o, a2);
        a3 = hn::MulAdd(hn::Set(d, row[3 * dim + i]), o, a3);
      }
      float* out = y + j * kTileTokenCount + lane;
      hn::Store(a0, d, out);
      hn::Store(a1, d, out + kTileTokenCount);
      hn::Store(a2, d, out + 2 * kTileTokenCount);
      hn::Store(a3, d, out + 3 * kTileTokenCount);
    }
    // Quantise. dot is <P o, t> in units of the step.
    const auto half = hn::Set(d, static_cast<float>(levels / 2));
    const auto top = hn::Set(d, static_cast<float>(levels - 1));
    const auto middle = hn::Set(d, 0.5f * static_cast<float>(levels - 1));
    auto dot = zero;
    uint32_t* words = reinterpret_cast<uint32_t*>(page);
    hn::Vec<decltype(du)> word[2] = {hn::Zero(du), hn::Zero(du)};
    for (int j = 0; j < p.layout.dims; ++j) {
      auto code = hn::Zero(du);
      if (j < dim) {
        const auto yj = hn::Load(d, y + j * kTileTokenCount + lane);
        auto u = hn::Add(hn::Floor(hn::Mul(yj, scale)), half);
        u = hn::Min(hn::Max(u, zero), top);
        dot = hn::MulAdd(yj, hn::Sub(u, middle), dot);
        code = hn::BitCast(du, hn::ConvertTo(di, u));
      }
      for (int part = 0; part < p.layout.parts; ++part) {
        const int word_dims = p.layout.word_dims(part);
        const auto mask = hn::Set(du, (1u << p.layout.width[part]) - 1);
        const int at = p.layout.shift(part, j % word_dims);
        word[part] = hn::Or(word[part], hn::ShiftLeftSame(hn::And(code, mask), at));
        code = hn::ShiftRightSame(code, p.layout.width[part]);
        if (j % word_dims + 1 < word_dims) continue;
        hn::StoreU(
            word[part], du,
            words + p.layout.tile_offset(part, tile) + (j / word_dims) * kTileTokenCount + lane);
        word[part] = hn::Zero(du);
      }
    }
    // f = ||k - c|| / <P o, t>, in bf16; 0 unless both are positive.
    const auto valid = hn::And(hn::Gt(length, zero), hn::Gt(dot, zero));
    auto f = hn::Div(length, hn::Mul(hn::IfThenElse(valid, dot, one), hn::Set(d, step)));
    f = hn::Min(f, hn::Set(d, 3.0e38f));
    f = hn::IfThenElseZero(valid, f);
    HWY_ALIGN float wide[kTileTokenCount];
    hn::Store(f, d, wide);
    FromFloatImpl(DType::kBF16, wide, n,
                  page + p.layout.factor_offset_bytes() + 2 * (tile * kTileTokenCount + lane));
  }
}

void EncodeTileImpl(const EncodeParams& p, DType dtype, const std::byte* keys, int64_t row_bytes,
                    std::byte* page, int tile) {
  HWY_ALIGN float x[kHeadDimMax * kTileTokenCount];
  HWY_ALIGN float y[kHeadDimMax * kTileTokenCount];
  LoadDifferences(dtype, keys, row_bytes, p.head_dim, p.centre, x);
  EncodeLanes(p, x, y, page, tile);
}

// x = H x for the lanes' vectors, [dim][16].
void Transform(const HadamardSigns& signs, int dim, int lane, float* HWY_RESTRICT x) {
  const D16 d;
  const int size = HadamardSize(dim);
  const auto scale = hn::Set(d, HadamardScale(dim));
  for (int part = 0; part < HadamardCount(dim); ++part) {
    float* const range = x + (part == 0 ? 0 : dim - size) * kTileTokenCount + lane;
    const auto at = [&](int i) { return range + i * kTileTokenCount; };
    for (int i = 0; i < size; ++i) {
      hn::Store(hn::Mul(hn::Load(d, at(i)), hn::Set(d, signs.of[part][i])), d, at(i));
    }
    for (int span = 1; span < size; span *= 2) {
      for (int first = 0; first < size; first += 2 * span) {
        for (int i = first; i < first + span; ++i) {
          const auto a = hn::Load(d, at(i));
          const auto b = hn::Load(d, at(i + span));
          hn::Store(hn::Add(a, b), d, at(i));
          hn::Store(hn::Sub(a, b), d, at(i + span));
        }
      }
    }
    for (int i = 0; i < size; ++i) hn::Store(hn::Mul(hn::Load(d, at(i)), scale), d, at(i));
  }
}

void EncodeValueTileImpl(const CodeLayout& layout, const HadamardSigns& signs, DType dtype,
                         const std::byte* values, int64_t row_bytes, const float* centre,
                         std::byte* page, int tile) {
  const D16 d;
  const hn::RebindToSigned<D16> di;
  const hn::Rebind<uint8_t, decltype(di)> d8;
  const int n = static_cast<int>(hn::Lanes(d));
  const int dim = layout.centre_dims;
  const int levels = 1 << layout.value_bits;
  const auto scale =
      hn::Set(d, std::sqrt(static_cast<float>(dim)) / QuantiserStep(layout.value_bits));
  const auto zero = hn::Zero(d);
  const auto half = hn::Set(d, static_cast<float>(levels / 2));
  const auto top = hn::Set(d, static_cast<float>(levels - 1));
  const auto middle = hn::Set(d, 0.5f * static_cast<float>(levels - 1));
  HWY_ALIGN float x[kHeadDimMax * kTileTokenCount];
  HWY_ALIGN uint8_t codes[kHeadDimMax * kTileTokenCount];
  LoadDifferences(dtype, values, row_bytes, dim, centre, x);
  for (int lane = 0; lane < kTileTokenCount; lane += n) {
    const auto length = Normalise(dim, lane, x);
    Transform(signs, dim, lane, x);
    auto dot = zero, square = zero;
    for (int j = 0; j < dim; ++j) {
      const auto y = hn::Load(d, x + j * kTileTokenCount + lane);
      auto u = hn::Add(hn::Floor(hn::Mul(y, scale)), half);
      u = hn::Min(hn::Max(u, zero), top);
      const auto t = hn::Sub(u, middle);
      dot = hn::MulAdd(y, t, dot);
      square = hn::MulAdd(t, t, square);
      hn::StoreU(hn::DemoteTo(d8, hn::ConvertTo(di, u)), d8, codes + j * kTileTokenCount + lane);
    }
    // g = ||w|| <y, t> / <t, t>, in bf16; 0 unless it is positive.
    auto g = hn::Mul(length, hn::Div(dot, square));
    g = hn::Min(g, hn::Set(d, 3.0e38f));
    g = hn::IfThenElseZero(hn::And(hn::Gt(length, zero), hn::Gt(dot, zero)), g);
    HWY_ALIGN float wide[kTileTokenCount];
    hn::Store(g, d, wide);
    FromFloatImpl(DType::kBF16, wide, n,
                  page + layout.value_factor_offset_bytes() + 2 * (tile * kTileTokenCount + lane));
  }
  constexpr int kGroups = kTileTokenCount / kValueGroupTokens;
  auto* words = reinterpret_cast<uint32_t*>(page + layout.value_code_offset_bytes()) +
                tile * kGroups * layout.value_group_words();
  for (int group = 0; group < kGroups; ++group) {
    for (int part = 0, below = 0; part < layout.value_parts(); ++part) {
      const int width = layout.value_width(part);
      const int count = layout.value_words(part);
      const uint32_t mask = ((1u << width) - 1) * 0x01010101u;
      for (int j = 0; j < count; ++j) {
        uint32_t word = 0;
        for (int p = 0; p < 8 / width; ++p) {
          uint32_t fields;
          std::memcpy(&fields,
                      codes + (p * count + j) * kTileTokenCount + group * kValueGroupTokens, 4);
          word |= ((fields >> below) & mask) << (width * p);
        }
        *words++ = word;
      }
      below += width;
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace spillway
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spillway {
HWY_EXPORT(RotateImpl);
HWY_EXPORT(EncodeTileImpl);
HWY_EXPORT(DistancesImpl);
HWY_EXPORT(EncodeValueTileImpl);

void StoreCode(const CodeLayout& layout, const uint8_t* codes, std::byte* page, int slot) {
  uint32_t* words = reinterpret_cast<uint32_t*>(page);
  int below = 0;  // bits of a code in the parts before this one
  for (int part = 0; part < layout.parts; ++part) {
    const int word_dims = layout.word_dims(part);
    const uint32_t mask = (1u << layout.width[part]) - 1;
    uint32_t* out =
        words + layout.tile_offset(part, slot / kTileTokenCount) + slot % kTileTokenCount;
    for (int i = 0; i < layout.words(part); ++i) {
      uint32_t word = 0;
      for (int d = 0; d < word_dims; ++d) {
        word |= ((codes[i * word_dims + d] >> below) & mask) << layout.shift(part, d);
      }
      out[i * kTileTokenCount] = word;
    }
    below += layout.width[part];
  }
}

void Rotate(const EncodeParams& params, const float* x, float* y) {
  HWY_DYNAMIC_DISPATCH(RotateImpl)(params, x, y);
}
void EncodeTile(const EncodeParams& params, DType dtype, const std::byte* keys, int64_t row_bytes,
                std::byte* page, int tile) {
  HWY_DYNAMIC_DISPATCH(EncodeTileImpl)(params, dtype, keys, row_bytes, page, tile);
}
void EncodeValueTile(const CodeLayout& layout, const HadamardSigns& signs, DType dtype,
                     const std::byte* values, int64_t row_bytes, const float* centre,
                     std::byte* page, int tile) {
  HWY_DYNAMIC_DISPATCH(EncodeValueTileImpl)
  (layout, signs, dtype, values, row_bytes, centre, page, tile);
}
void Distances(DType dtype, const std::byte* vectors, int64_t row_bytes, int count, int dim,
               const float* centre, float* distances) {
  HWY_DYNAMIC_DISPATCH(DistancesImpl)(dtype, vectors, row_bytes, count, dim, centre, distances);
}
}  // namespace spillway
#endif

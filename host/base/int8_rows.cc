#include "host/base/int8_rows.h"

#include "host/base/elements.h"

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#define HWY_WANT_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "host/base/int8_rows.cc"
#include "hwy/foreach_target.h"
//
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "host/base/elements-inl.h"
#include "host/base/limits.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spillway {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A number that exactly `count` of the ranks [n] are above. They differ from one another, and n >
// count.
HWY_INLINE uint32_t RankLimit(const uint32_t* ranks, int n, size_t count) {
  const hn::RebindToUnsigned<DElements> du;
  const int lanes = static_cast<int>(hn::Lanes(du));
  uint32_t low = 0, high = 0xFFFFFFFFu;
  for (;;) {
    const uint32_t middle = low + (high - low) / 2;
    const auto limit = hn::Set(du, middle);
    size_t above = 0;
    for (int i = 0; i < n; i += lanes) {
      above += hn::CountTrue(du, hn::Gt(hn::Load(du, ranks + i), limit));
    }
    if (above == count) return middle;
    (above > count ? low : high) = middle;
  }
}

// Writes codes [d] and highs [high_count] of a vector. Returns its scale.
HWY_INLINE float EncodeVector(const RowFormat& format, const std::byte* vector, int high_count,
                              std::byte* codes, std::byte* highs) {
  const DElements d;
  const hn::RebindToUnsigned<DElements> du;
  const int n = format.head_dim;
  const int lanes = static_cast<int>(hn::Lanes(d));
  HWY_ALIGN float x[kHeadDimMax];
  HWY_ALIGN uint32_t ranks[kHeadDimMax];
  HWY_ALIGN int32_t element[kHeadDimMax];
  ToFloatImpl(format.dtype, vector, n, x);
  for (int i = 0; i < n; ++i) ranks[i] = Int8Rank(x[i], i);
  const uint32_t limit = RankLimit(ranks, n, static_cast<size_t>(high_count));
  const auto limits = hn::Set(du, limit);
  auto largests = hn::Zero(d), rests = hn::Zero(d);
  for (int i = 0; i < n; i += lanes) {
    const auto size = hn::Abs(hn::Load(d, x + i));
    const auto is_high = hn::RebindMask(d, hn::Gt(hn::Load(du, ranks + i), limits));
    largests = hn::Max(largests, size);
    rests = hn::Max(rests, hn::IfThenZeroElse(is_high, size));
  }
  const auto most = [&](auto v) { return hn::GetLane(hn::MaxOfLanes(d, v)); };
  const float scale = Int8Scale(most(rests), most(largests));
  const float inverse = Int8InverseScale(scale);
  const float largest_element = LargestElement(format.dtype);
  for (int i = 0; i < n; ++i) element[i] = Int8Element(x[i], scale, inverse, largest_element);
  // Elements with a high part, by falling rank.
  uint32_t top[kInt8HighCountMax];
  int found = 0;
  for (int i = 0; i < n; ++i) {
    if (ranks[i] > limit) top[found++] = ranks[i];
  }
  for (int m = 0; m < found; ++m) {
    int at = 0;
    for (int other = 0; other < found; ++other) at += top[other] > top[m] ? 1 : 0;
    const int i = Int8ElementOf(top[m]);
    const int high = Int8High(element[i]);
    element[i] -= high * kInt8HighStep;
    highs[2 * at] = static_cast<std::byte>(i);
    highs[2 * at + 1] = static_cast<std::byte>(high);
  }
  for (int i = 0; i < n; ++i) codes[i] = static_cast<std::byte>(element[i]);
  return scale;
}

HWY_NOINLINE void EncodeInt8RowImpl(const RowFormat& format, const std::byte* k, const std::byte* v,
                                    std::byte* row) {
  const int d = format.head_dim;
  std::byte* const highs = row + Int8HighOffset(d);
  std::byte* const key_highs = highs + 2 * kInt8ValueHighCount;
  const float scales[2] = {EncodeVector(format, k, Int8KeyHighCount(d), row, key_highs),
                           EncodeVector(format, v, kInt8ValueHighCount, row + d, highs)};
  FromFloatImpl(DType::kBF16, scales, 2, row + Int8ScaleOffset(d));
  const int end = Int8HighOffset(d) + 2 * Int8HighCount(d);
  std::memset(row + end, 0, static_cast<size_t>(Int8RowBytes(d) - end));
}

// `count` elements x, finite, in the dtype.
HWY_INLINE void Narrow(DType dtype, const float* x, int count, std::byte* out) {
  if (dtype != DType::kBF16) return FromFloatImpl(dtype, x, count, out);
  const DElements d;
  const hn::RebindToUnsigned<DElements> du;
  const hn::Rebind<uint16_t, DElements> dh;
  const int n = static_cast<int>(hn::Lanes(d));
  for (int i = 0; i < count; i += n) {
    const auto bits = hn::BitCast(du, hn::LoadU(d, x + i));
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const auto rounded = hn::Add(hn::Add(bits, hn::Set(du, 0x7FFF)), odd);
    hn::StoreU(hn::TruncateTo(dh, hn::ShiftRight<16>(rounded)), dh,
               reinterpret_cast<uint16_t*>(out) + i);
  }
}

HWY_INLINE void DecodeVector(const RowFormat& format, const std::byte* codes, float scale,
                             const std::byte* highs, int high_count, std::byte* out) {
  const DElements d;
  const hn::Rebind<int8_t, DElements> db;
  const hn::RebindToSigned<DElements> di;
  const int n = static_cast<int>(hn::Lanes(d));
  const auto* const of_code = reinterpret_cast<const int8_t*>(codes);
  HWY_ALIGN float x[kHeadDimMax];
  const auto scales = hn::Set(d, scale);
  for (int i = 0; i < format.head_dim; i += n) {
    const auto wide = hn::PromoteTo(di, hn::LoadU(db, of_code + i));
    hn::Store(hn::Mul(hn::ConvertTo(d, wide), scales), d, x + i);
  }
  for (int j = 0; j < high_count; ++j) {
    const auto i = static_cast<uint8_t>(highs[2 * j]);
    x[i] = Int8Product(of_code[i], static_cast<int8_t>(highs[2 * j + 1]), scale);
  }
  Narrow(format.dtype, x, format.head_dim, out);
}

HWY_NOINLINE void DecodeInt8RowImpl(const RowFormat& format, const std::byte* row, std::byte* k,
                                    std::byte* v) {
  const int d = format.head_dim;
  float scales[2];
  ToFloatImpl(DType::kBF16, row + Int8ScaleOffset(d), 2, scales);
  const std::byte* const highs = row + Int8HighOffset(d);
  DecodeVector(format, row, scales[0], highs + 2 * kInt8ValueHighCount, Int8KeyHighCount(d), k);
  DecodeVector(format, row + d, scales[1], highs, kInt8ValueHighCount, v);
}

}  // namespace HWY_NAMESPACE
}  // namespace spillway
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spillway {
HWY_EXPORT(EncodeInt8RowImpl);
HWY_EXPORT(DecodeInt8RowImpl);

void EncodeInt8Row(const RowFormat& format, const std::byte* k, const std::byte* v,
                   std::byte* row) {
  HWY_DYNAMIC_DISPATCH(EncodeInt8RowImpl)(format, k, v, row);
}
void DecodeInt8Row(const RowFormat& format, const std::byte* row, std::byte* k, std::byte* v) {
  HWY_DYNAMIC_DISPATCH(DecodeInt8RowImpl)(format, row, k, v);
}

bool IsInt8Row(const RowFormat& format, const std::byte* row) {
  const int d = format.head_dim;
  float scales[2];
  ToFloat(DType::kBF16, row + Int8ScaleOffset(d), 2, scales);
  for (const float scale : scales) {
    if (!(scale >= 0 && scale <= LargestElement(DType::kF32))) return false;
  }
  const std::byte* const highs = row + Int8HighOffset(d);
  const auto fits = [&](const std::byte* code, std::byte high, float scale) {
    const float x = Int8Product(static_cast<int8_t>(*code), static_cast<int8_t>(high), scale);
    return std::fabs(x) <= LargestElement(format.dtype);
  };
  for (int i = 0; i < 2 * d; ++i) {
    if (!fits(row + i, std::byte{0}, scales[i / d])) return false;
  }
  for (int n = 0; n < Int8HighCount(d); ++n) {
    const int of_value = n < kInt8ValueHighCount ? 1 : 0;
    const auto element = static_cast<int>(highs[2 * n]);
    if (element >= d) return false;
    if (!fits(row + of_value * d + element, highs[2 * n + 1], scales[of_value])) return false;
  }
  return true;
}

}  // namespace spillway
#endif

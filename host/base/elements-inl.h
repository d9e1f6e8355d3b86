// Implementations of the conversions in elements.h with Highway; included once per target.
#if defined(SPILLWAY_ELEMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPILLWAY_ELEMENTS_INL_H_
#undef SPILLWAY_ELEMENTS_INL_H_
#else
#define SPILLWAY_ELEMENTS_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "host/base/dtype.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spillway {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Most elements in one vector.
inline constexpr int kElementLanes = 16;
using DElements = hn::CappedTag<float, kElementLanes>;

template <typename V>
HWY_INLINE auto LoadWide(DElements d, const V* p) {
  if constexpr (std::is_same_v<V, float>) {
    return hn::LoadU(d, p);
  } else {
    return hn::PromoteTo(d, hn::LoadU(hn::Rebind<V, DElements>(), p));
  }
}

inline HWY_NOINLINE void ToFloatImpl(DType dtype, const std::byte* in, int64_t count, float* out) {
  const DElements d;
  const int64_t n = static_cast<int64_t>(hn::Lanes(d));
  const auto convert = [&](auto* p) {
    int64_t i = 0;
    for (; i + n <= count; i += n) hn::StoreU(LoadWide(d, p + i), d, out + i);
    if (i == count) return;
    std::remove_cvref_t<decltype(*p)> last[kElementLanes] = {};
    HWY_ALIGN float wide[kElementLanes];
    std::memcpy(last, p + i, (count - i) * sizeof(*p));
    hn::Store(LoadWide(d, last), d, wide);
    std::memcpy(out + i, wide, (count - i) * sizeof(float));
  };
  if (dtype == DType::kF32) {
    std::memcpy(out, in, count * sizeof(float));
  } else if (dtype == DType::kF16) {
    convert(reinterpret_cast<const hwy::float16_t*>(in));
  } else {
    convert(reinterpret_cast<const hwy::bfloat16_t*>(in));
  }
}

inline HWY_NOINLINE void FromFloatImpl(DType dtype, const float* in, int64_t count,
                                       std::byte* out) {
  if (dtype == DType::kF32) {
    std::memcpy(out, in, count * sizeof(float));
    return;
  }
  if (dtype == DType::kBF16) {
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = std::bit_cast<uint32_t>(in[i]);
      const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
      const uint16_t half = static_cast<uint16_t>(
          nan ? (bits >> 16) | 0x40 : (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16);
      std::memcpy(out + i * 2, &half, 2);
    }
    return;
  }
  const DElements d;
  const hn::Rebind<hwy::float16_t, DElements> dh;
  const int64_t n = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < count; i += n) {
    HWY_ALIGN float wide[kElementLanes] = {};
    HWY_ALIGN hwy::float16_t narrow[kElementLanes];
    const int64_t m = std::min(n, count - i);
    std::memcpy(wide, in + i, m * sizeof(float));
    hn::Store(hn::DemoteTo(dh, hn::Load(d, wide)), dh, narrow);
    std::memcpy(out + i * 2, narrow, m * 2);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace spillway
HWY_AFTER_NAMESPACE();

#endif

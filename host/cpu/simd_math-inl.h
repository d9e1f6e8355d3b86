// Loads, and Highway versions of functions of host/core. Included once per SIMD target.
#if defined(SPILLWAY_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SPILLWAY_SIMD_MATH_INL_H_
#undef SPILLWAY_SIMD_MATH_INL_H_
#else
#define SPILLWAY_SIMD_MATH_INL_H_
#endif

#include <type_traits>

#include "host/core/exp.h"
#include "host/core/score.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spillway {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Elements of rows (float, float16_t or bfloat16_t) as fp32, from any address.
template <class D, typename T>
HWY_INLINE hn::Vec<D> LoadWide(D d, const T* p) {
  if constexpr (std::is_same_v<T, float>) {
    return hn::LoadU(d, p);
  } else {
    return hn::PromoteTo(d, hn::LoadU(hn::Rebind<T, D>(), p));
  }
}

// ExpF32() of each lane, with the same bits.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V ExpVec(D d, V x) {
  const hn::RebindToSigned<D> di;
  const auto round = hn::Set(d, kExpRound);
  const auto t = hn::MulAdd(x, hn::Set(d, kExpLog2E), round);
  const auto n = hn::Sub(t, round);
  auto r = hn::MulAdd(n, hn::Set(d, -kExpLn2Hi), x);
  r = hn::MulAdd(n, hn::Set(d, -kExpLn2Lo), r);
  auto q = hn::Set(d, kExpQ4);
  q = hn::MulAdd(q, r, hn::Set(d, kExpQ3));
  q = hn::MulAdd(q, r, hn::Set(d, kExpQ2));
  q = hn::MulAdd(q, r, hn::Set(d, kExpQ1));
  q = hn::MulAdd(q, r, hn::Set(d, kExpQ0));
  const auto p = hn::MulAdd(q, hn::Mul(r, r), hn::Add(r, hn::Set(d, 1.0f)));
  const auto e = hn::Sub(hn::BitCast(di, t), hn::BitCast(di, round));
  const auto scale = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(e, hn::Set(di, 127))));
  return hn::IfThenElseZero(hn::Ge(x, hn::Set(d, kExpMin)), hn::Mul(p, scale));
}

// ScoreExp2() of each lane, with the same bits.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V ScoreExp2Vec(D d, V x) {
  const hn::RebindToUnsigned<D> du;
  const auto round = hn::Set(d, kScoreRound);
  x = hn::Max(hn::Min(x, hn::Set(d, kScoreMax)), hn::Set(d, kScoreMin));
  const auto t = hn::Add(x, round);
  const auto r = hn::Sub(x, hn::Sub(t, round));
  auto p = hn::MulAdd(hn::Set(d, kScoreC4), r, hn::Set(d, kScoreC3));
  p = hn::MulAdd(p, r, hn::Set(d, kScoreC2));
  p = hn::MulAdd(p, r, hn::Set(d, kScoreC1));
  p = hn::MulAdd(p, r, hn::Set(d, kScoreC0));
  return hn::BitCast(d, hn::Add(hn::BitCast(du, p), hn::ShiftLeft<23>(hn::BitCast(du, t))));
}

}  // namespace HWY_NAMESPACE
}  // namespace spillway
HWY_AFTER_NAMESPACE();

#endif

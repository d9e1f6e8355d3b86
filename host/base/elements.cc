#include "host/base/elements.h"

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#define HWY_WANT_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "host/base/elements.cc"
#include "hwy/foreach_target.h"
//
#include "host/base/elements-inl.h"
#include "hwy/highway.h"

#if HWY_ONCE
namespace spillway {
HWY_EXPORT(ToFloatImpl);
HWY_EXPORT(FromFloatImpl);

const char* SimdTargetName() {
  return hwy::TargetName(hwy::SupportedTargets() & -hwy::SupportedTargets());
}

bool SimdSupported() {
#if HWY_ARCH_X86
  return (hwy::SupportedTargets() & (HWY_AVX2 | HWY_AVX3 | HWY_AVX3_DL)) != 0;
#else
  return true;
#endif
}

void ToFloat(DType dtype, const std::byte* in, int64_t count, float* out) {
  HWY_DYNAMIC_DISPATCH(ToFloatImpl)(dtype, in, count, out);
}
void FromFloat(DType dtype, const float* in, int64_t count, std::byte* out) {
  HWY_DYNAMIC_DISPATCH(FromFloatImpl)(dtype, in, count, out);
}

}  // namespace spillway
#endif

// Counts the buckets that keys share with a query; one lane per token.
#include "host/methods/lsh_sampling/count_shared.h"

#include "host/base/limits.h"

// One compilation of this file per instruction set; see Highway's
// "Dynamic dispatch".
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "host/methods/lsh_sampling/count_shared.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spillway {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

void CountSharedImpl(const uint16_t* query, int table_count, const std::byte* buckets,
                     uint16_t* counts) {
  const hn::CappedTag<uint16_t, 32> d;
  const int n = static_cast<int>(hn::Lanes(d));
  const auto* names = reinterpret_cast<const uint16_t*>(buckets);
  const auto one = hn::Set(d, uint16_t{1});
  for (int t = 0; t < kPageTokenCount; t += n) {
    auto count = hn::Zero(d);
    for (int table = 0; table < table_count; ++table) {
      const auto name = hn::LoadU(d, names + int64_t{table} * kPageTokenCount + t);
      const auto same = hn::Eq(name, hn::Set(d, query[table]));
      count = hn::Add(count, hn::IfThenElseZero(same, one));
    }
    hn::StoreU(count, d, counts + t);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace spillway
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spillway {
HWY_EXPORT(CountSharedImpl);

void CountShared(const uint16_t* query, int table_count, const std::byte* buckets,
                 uint16_t* counts) {
  HWY_DYNAMIC_DISPATCH(CountSharedImpl)(query, table_count, buckets, counts);
}

}  // namespace spillway
#endif

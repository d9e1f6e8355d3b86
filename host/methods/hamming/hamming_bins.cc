// Counts matching bits of codes, for 16 keys at a time.
#include "host/methods/hamming/hamming_bins.h"

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#define HWY_WANT_AVX3_DL
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "host/methods/hamming/hamming_bins.cc"
#include "hwy/foreach_target.h"
//
#include "host/cpu/code_products-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spillway {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <int kWidth>
void HammingBinsOf(const ScoreQuery& q, int part, const ScanPage& page, int tile_begin,
                   int tile_end, uint16_t* bins) {
  const DI di;
  const hn::Rebind<uint16_t, DI> d16;
  const int n = static_cast<int>(hn::Lanes(di));
  for (int tile = tile_begin; tile < tile_end; tile += kPair) {
    for (int lane = 0; lane < kTileTokenCount; lane += n) {
      VI sums[kPair][1];
      DotPart<kWidth, true, 1, kPair>(q.layout, part, page, tile, lane, q.weights, q.offset, sums);
      for (int t = 0; t < kPair; ++t) {
        hn::StoreU(hn::DemoteTo(d16, sums[t][0]), d16,
                   bins + (tile + t - tile_begin) * kTileTokenCount + lane);
      }
    }
  }
}

void HammingBinsImpl(const ScoreQuery& q, const ScanPage& page, int tile_begin, int tile_end,
                     uint16_t* bins) {
  const int part = q.layout.parts - 1;
  switch (q.layout.width[part]) {
    case 1:
      return HammingBinsOf<1>(q, part, page, tile_begin, tile_end, bins);
    case 2:
      return HammingBinsOf<2>(q, part, page, tile_begin, tile_end, bins);
    default:
      return HammingBinsOf<4>(q, part, page, tile_begin, tile_end, bins);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace spillway
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spillway {
HWY_EXPORT(HammingBinsImpl);

void HammingBins(const ScoreQuery& query, const ScanPage& page, int tile_begin, int tile_end,
                 uint16_t* bins) {
  HWY_DYNAMIC_DISPATCH(HammingBinsImpl)(query, page, tile_begin, tile_end, bins);
}
}  // namespace spillway
#endif

#include "host/device/copy_layers.h"

#include <algorithm>

namespace spillway {

int64_t CopyLayers::Fitting(const Pages& pages, int64_t spare_share) {
  int64_t needed = std::max<int64_t>(1, pages.of_first + pages.ahead);
  if (spare_share > 0) needed += (needed + spare_share - 1) / spare_share;
  // The first layer may need its share of what is free.
  return 1 + std::max<int64_t>(0, pages.of_others + pages.free - pages.ahead) / needed;
}

void CopyLayers::Fit(const Pages& pages) {
  const int64_t fit = Fitting(pages, 0), fit_well = Fitting(pages, kSpareShare);
  int count = count_.load(std::memory_order_relaxed);
  int wanted = 0;
  do {
    const int64_t fewer = std::min<int64_t>(count, fit);
    wanted = static_cast<int>(std::clamp<int64_t>(std::max(fewer, fit_well), 1, layer_count_));
  } while (!count_.compare_exchange_weak(count, wanted, std::memory_order_relaxed));
}

bool CopyLayers::Lower(const Pages& pages) {
  int count = count_.load(std::memory_order_relaxed);
  if (count == 1 || pages.of_others > (count - 1) * pages.of_first) return false;
  return count_.compare_exchange_strong(count, count - 1, std::memory_order_relaxed);
}

}  // namespace spillway

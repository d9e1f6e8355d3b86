#include "host/base/descriptor_limit.h"

#include <sys/eventfd.h>
#include <sys/resource.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "host/base/descriptor.h"

namespace spillway {
namespace {

constexpr int64_t kMarginMax = 256;
constexpr int64_t kMarginShare = 8;

int64_t Limit(rlim_t limit) {
  return static_cast<int64_t>(std::min<rlim_t>(limit, std::numeric_limits<int>::max()));
}

}  // namespace

int64_t RaiseDescriptorLimit() {
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  const rlim_t before = std::exchange(limit.rlim_cur, limit.rlim_max);
  return Limit(setrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : before);
}

int64_t DescriptorLimit() {
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  return Limit(limit.rlim_cur);
}

bool IsShortOfDescriptors(DescriptorUse use) {
  const int64_t count = DescriptorLimit();
  int64_t margin = std::min(kMarginMax, count / kMarginShare);
  if (use == DescriptorUse::kSession) margin /= 2;
  // A new descriptor has the lowest number that is free: all below it are in use.
  const Descriptor lowest(eventfd(0, EFD_CLOEXEC));
  return !lowest.valid() || lowest.get() >= count - margin;
}

}  // namespace spillway

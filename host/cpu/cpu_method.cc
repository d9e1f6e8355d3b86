#include "host/cpu/cpu_method.h"

#include <algorithm>

namespace spillway {
namespace {

template <typename Predicate>
const CpuMethod* Find(Predicate brings) {
  const std::span<const Method* const> methods = OptionalMethods();
  const auto found = std::find_if(methods.begin(), methods.end(),
                                  [&](const Method* method) { return brings(*method); });
  return found == methods.end() ? nullptr : (*found)->cpu;
}

}  // namespace

const CpuMethod* FindCpuMethod(Selector selector) {
  return Find(
      [&](const Method& m) { return m.selector != nullptr && m.selector->selector == selector; });
}

const CpuMethod* FindCpuMethod(Tail tail) {
  return Find([&](const Method& m) { return m.tail != nullptr && m.tail->tail == tail; });
}

const CpuMethod* FindFirstSelection() {
  return Find([](const Method& m) { return m.is_first_selection; });
}

}  // namespace spillway

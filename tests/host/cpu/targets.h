#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace spillway {

// Runs `compute` once with each instruction set that both this machine and the kernels support.
// Expects the same bytes each time, and returns them.
std::vector<std::byte> SameOnEveryTarget(
    const std::function<void(std::vector<std::byte>&)>& compute);

// Appends the bytes of a vector.
template <typename T>
void AppendBytes(const std::vector<T>& from, std::vector<std::byte>& to) {
  const auto* p = reinterpret_cast<const std::byte*>(from.data());
  to.insert(to.end(), p, p + from.size() * sizeof(T));
}

}  // namespace spillway

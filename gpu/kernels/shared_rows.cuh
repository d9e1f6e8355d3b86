#pragma once

#include "gpu/kernels/device_math.cuh"

// Rows that several units of a wave bring to the GPU cross the link once: the first unit that asks
// for a row brings it, and the others read it where that one puts it.
namespace spillway::cuda {

// Slots in which a row is looked for. If all are taken, the row is brought again.
inline constexpr int kSharedRowProbes = 8;

// Empties unit `unit`'s part of the table. All threads of a block; kernels of later launches fill
// the table.
__device__ inline void ClearSharedRows(const SharedRows& rows, int unit) {
  if (rows.slots == 0) return;
  const uint32_t first = static_cast<uint32_t>(unit) * kSharedRowSlots;
  for (uint32_t i = threadIdx.x; i < kSharedRowSlots; i += blockDim.x) {
    rows.keys[first + i] = 0;
    rows.places[first + i] = nullptr;
  }
}

// Where the row at `from` in host memory is brought to: to `to`, by the caller, if it is the first
// to ask, else where the first one brings it. REQUIRES: from and to are not null.
__device__ inline std::byte* PlaceSharedRow(const SharedRows& rows, const std::byte* from,
                                            std::byte* to) {
  const auto key = reinterpret_cast<unsigned long long>(from);
  // A row has at least 16 bytes.
  const auto hash = static_cast<uint32_t>((key >> 4) * 0x9E3779B97F4A7C15u >> 32);
  uint32_t slot = __umulhi(hash, rows.slots);
  unsigned long long found = ~0ull;
  for (int probe = 0; probe < kSharedRowProbes; ++probe) {
    found = atomicCAS(rows.keys + slot, 0ull, key);
    if (found == 0) {
      *const_cast<std::byte* volatile*>(rows.places + slot) = to;
      return to;
    }
    if (found == key) break;
    slot = slot + 1 < rows.slots ? slot + 1 : 0;
  }
  if (found != key) return to;
  // The first one writes its place at once.
  std::byte* place = nullptr;
  while (place == nullptr) place = *const_cast<std::byte* volatile*>(rows.places + slot);
  return place;
}

}  // namespace spillway::cuda

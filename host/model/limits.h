#pragma once

namespace spillway {

// Query heads of a KV head, and elements of a key, at most.
inline constexpr int kGroupMax = 16;
inline constexpr int kHeadDimMax = 256;

}  // namespace spillway

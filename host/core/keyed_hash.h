#pragma once

#include <cstdint>

#include "host/base/host_device.h"

namespace spillway {

// Sampling without a random generator. A token's u is a hash of (seed, layer, KV head, token) in
// [0, 2^32). SamplePlace() turns u into the token's place in the order of a step. A token is
// sampled if and only if its place is below a threshold. So samples nest: the sample of a smaller
// threshold is part of the sample of a larger one.
struct SampleKey {
  uint32_t multiplier;  // odd
  uint32_t offset;
  uint32_t mask;
};

SPILLWAY_HOST_DEVICE inline uint64_t SplitMix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

SPILLWAY_HOST_DEVICE inline SampleKey MakeSampleKey(uint64_t seed, int layer, int kv_head) {
  const uint64_t a = SplitMix64(
      seed ^ SplitMix64((static_cast<uint64_t>(layer) << 32) | static_cast<uint32_t>(kv_head)));
  const uint64_t b = SplitMix64(a);
  return {static_cast<uint32_t>(a) | 1u, static_cast<uint32_t>(a >> 32), static_cast<uint32_t>(b)};
}

// A bijection on 32 bits with three keys. The finaliser is that of MurmurHash3.
SPILLWAY_HOST_DEVICE inline uint32_t TokenHash(const SampleKey& key, uint32_t token) {
  uint32_t h = token * key.multiplier + key.offset;
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= key.mask;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  h ^= h >> 16;
  return h;
}

// Bit i of the result: whether the hash of token first + i is below limit. Much faster than hashing
// tokens one by one.
uint32_t TokensBelow(const SampleKey& key, uint32_t first, uint32_t limit);

// The order in which a step draws tokens. Tokens with u < resident come first: these are the
// resident sample, whose rows may be in faster memory. Within the resident sample, and within all
// other tokens, the order is rotated by a hash of the visible length. So steps differ, but the same
// request always gives the same sample. With resident = 0 all tokens are one part. Places are
// uniformly distributed for any value of resident.
struct SampleOrder {
  SampleKey key;
  uint32_t resident;
  uint32_t resident_phase;  // in [0, resident), or 0
  uint32_t phase;           // in [0, 2^32 - resident)
};

SPILLWAY_HOST_DEVICE inline SampleOrder MakeSampleOrder(uint64_t seed, int layer, int kv_head,
                                                        int64_t visible_token_count,
                                                        uint32_t resident = 0) {
  const SampleKey key = MakeSampleKey(~seed, layer, kv_head);
  const uint64_t phi =
      static_cast<uint32_t>(SplitMix64((static_cast<uint64_t>(key.mask) << 32 | key.offset) ^
                                       SplitMix64(static_cast<uint64_t>(visible_token_count))));
  const uint64_t beyond = (uint64_t{1} << 32) - resident;
  return {MakeSampleKey(seed, layer, kv_head), resident,
          static_cast<uint32_t>(phi * resident >> 32), static_cast<uint32_t>(phi * beyond >> 32)};
}

SPILLWAY_HOST_DEVICE inline uint32_t SamplePlace(const SampleOrder& order, uint32_t token) {
  const uint32_t u = TokenHash(order.key, token);
  if (u < order.resident) {
    return u - order.resident_phase + (u < order.resident_phase ? order.resident : 0);
  }
  return u - order.phase - (u - order.resident < order.phase ? order.resident : 0);
}

// A threshold that samples about `wanted` of `population` tokens; 2^32 takes all of them.
SPILLWAY_HOST_DEVICE inline uint64_t SampleThreshold(int64_t wanted, int64_t population) {
  if (wanted >= population) return uint64_t{1} << 32;
  return static_cast<uint64_t>(static_cast<double>(wanted) / static_cast<double>(population) *
                               4294967296.0);
}

}  // namespace spillway

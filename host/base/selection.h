#pragma once

#include <cstdint>
#include <vector>

namespace spillway {

// Stratum of a selected row.
inline constexpr uint8_t kStratumSink = 0;
inline constexpr uint8_t kStratumWindow = 1;
inline constexpr uint8_t kStratumHeavy = 2;
inline constexpr uint8_t kStratumTail = 3;  // and up, by falling rank

// The rows chosen for one (query, group), in ascending order of tokens.
struct Selection {
  std::vector<uint32_t> indices;
  std::vector<float> log_weights;  // 0, or log(n_h / r_h) for a row sampled from stratum h
  std::vector<uint8_t> strata;
};

}  // namespace spillway

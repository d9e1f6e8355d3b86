// The weights of a small Llama, from a Hugging Face folder.
#pragma once

#include <Eigen/Core>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// The fields of config.json that the model needs.
struct Config {
  int64_t vocabulary_size, hidden_size, intermediate_size;
  int64_t layer_count, head_count, kv_head_count, head_dim;
  float rms_norm_eps, rope_theta;
  bool tied;  // lm_head shares the embedding's weights
};

// Projections [out, in]; norms [1, hidden_size].
struct Layer {
  Matrix attention_norm, q, k, v, o;
  Matrix mlp_norm, gate, up, down;
};

struct Checkpoint {
  Config config;
  Matrix embedding;  // [vocabulary_size, hidden_size]
  Matrix head;       // lm_head, same shape; empty if tied
  Matrix norm;
  std::vector<Layer> layers;
};

// Reads config.json and model.safetensors (F32 or BF16). NOT_FOUND if a file cannot be read.
// INVALID_ARGUMENT, with the reason, if a file is malformed, or if the model is not a Llama with
// the default rotary embedding, without biases and quantization.
absl::StatusOr<Checkpoint> LoadCheckpoint(const std::string& folder);

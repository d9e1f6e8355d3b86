// The weights of a small Llama, from a Hugging Face folder.
#pragma once

#include <Eigen/Core>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// config.json, as far as the model depends on it.
struct Config {
  int64_t vocabulary_size, hidden_size, intermediate_size;
  int64_t layer_count, head_count, kv_head_count, head_dim;
  float rms_norm_eps, rope_theta;
  bool tied;  // the head's weights are the embedding's
};

// Projections [out, in]; norms [1, hidden_size].
struct Layer {
  Matrix attention_norm, q, k, v, o;
  Matrix mlp_norm, gate, up, down;
};

struct Checkpoint {
  Config config;
  Matrix embedding;  // [vocabulary_size, hidden_size]
  Matrix head;       // the same; empty where tied
  Matrix norm;
  std::vector<Layer> layers;
};

// Reads config.json and model.safetensors, F32 or BF16. NOT_FOUND where one cannot be read;
// INVALID_ARGUMENT, naming what is wrong, where one is malformed or of a model other than a Llama
// with the default rotary embedding and without biases and quantization.
absl::StatusOr<Checkpoint> LoadCheckpoint(const std::string& folder);

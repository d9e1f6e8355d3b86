#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "host/model/model_spec.h"

namespace spillway {

// Digits of a digest that a file's name repeats.
inline constexpr int kNameDigestDigits = 16;

// Tokens [start, end) of all layers: what one file of a snapshot holds.
struct TokenRun {
  int64_t start = 0;
  int64_t end = 0;
  int64_t count() const { return end - start; }
};

// How the rows of a sequence are cut into files, and what such a file is: a safetensors
// file of the tensors layers.{l}.k and layers.{l}.v, [H_kv, T, d] of the run's tokens in
// the model's dtype, in this order, with the metadata token_start and token_end. Its
// header follows from model and run alone, so that a reader compares it and parses nothing.
// Plain data; thread-safe.
class SnapshotLayout {
 public:
  // Tokens per file: so many that a file has 64 MiB at most and a layer's part of it 8 MiB,
  // whole pages where that is more than one; at least one token.
  explicit SnapshotLayout(const ModelSpec& spec) : SnapshotLayout(spec, TokensPerFile(spec)) {}
  // REQUIRES: tokens_per_file in [1, TokensPerFile(spec)].
  SnapshotLayout(const ModelSpec& spec, int64_t tokens_per_file)
      : spec_(spec), tokens_per_file_(tokens_per_file) {}
  static int64_t TokensPerFile(const ModelSpec& spec);

  const ModelSpec& spec() const { return spec_; }
  int64_t tokens_per_file() const { return tokens_per_file_; }
  // Files of a sequence of so many tokens, and the tokens of the i-th.
  int64_t FileCount(int64_t token_count) const {
    return token_count / tokens_per_file_ + (token_count % tokens_per_file_ != 0 ? 1 : 0);
  }
  TokenRun Run(int64_t file, int64_t token_count) const;

  // Bytes of one layer's K, or V, of a run; of a run's layers; of the file.
  int64_t HalfBytes(TokenRun run) const;
  int64_t LayerBytes(TokenRun run) const { return 2 * HalfBytes(run); }
  int64_t FileBytes(TokenRun run) const;
  // The file's first bytes: the header's length and the header, a multiple of 8 bytes.
  std::string Header(TokenRun run) const;

  // rows-{start}-{end}-{the digest's first digits}.safetensors
  static std::string FileName(TokenRun run, std::string_view sha256);
  // The name up to the digest.
  static std::string NamePrefix(TokenRun run);

 private:
  const ModelSpec spec_;
  const int64_t tokens_per_file_;
};

// client-{the digest's first digits}.bin
std::string ClientDataName(std::string_view sha256);
// Whether a file of a snapshot could have this name, other than its manifest.
bool IsDataFileName(std::string_view name);

}  // namespace spillway

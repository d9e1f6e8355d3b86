#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "host/model/model_spec.h"

namespace spillway {

// Digits of the digest in a file's name.
inline constexpr int kNameDigestDigits = 16;

// Tokens [start, end) of all layers: what one file of a snapshot holds.
struct TokenRun {
  int64_t start = 0;
  int64_t end = 0;
  int64_t count() const { return end - start; }
};

// How the rows of a sequence are divided into files, and the format of a file: a safetensors file
// with the tensors layers.{l}.k and layers.{l}.v of shape [H_kv, T, d], in this order, for the
// tokens of the run, in the model's dtype, with the metadata token_start and token_end. Rows that
// are not stored in the dtype are saved as they are: layers.{l}.rows, U8 [H_kv, T, row_bytes]. The
// header depends only on the model and the run, so a reader compares it and parses nothing. Plain
// data; thread-safe.
class SnapshotLayout {
 public:
  // Tokens per file: as many as fit into 64 MiB per file and 8 MiB per layer of a file, rounded
  // down to whole pages if that leaves at least one page, and at least one token.
  explicit SnapshotLayout(const ModelSpec& spec) : SnapshotLayout(spec, TokensPerFile(spec)) {}
  // REQUIRES: tokens_per_file in [1, TokensPerFile(spec)].
  SnapshotLayout(const ModelSpec& spec, int64_t tokens_per_file)
      : spec_(spec), tokens_per_file_(tokens_per_file) {}
  static int64_t TokensPerFile(const ModelSpec& spec);

  const ModelSpec& spec() const { return spec_; }
  int64_t tokens_per_file() const { return tokens_per_file_; }
  // The number of files of a sequence with token_count tokens, and the tokens of one file.
  int64_t FileCount(int64_t token_count) const {
    return token_count / tokens_per_file_ + (token_count % tokens_per_file_ != 0 ? 1 : 0);
  }
  TokenRun Run(int64_t file, int64_t token_count) const;

  // Whether a layer has the tensors k and v; else rows.
  bool has_halves() const { return spec_.row_type == RowType::kElements; }
  // Bytes of a run: of the rows of one layer; of its K (or V), if it has_halves(); of the whole
  // file.
  int64_t LayerBytes(TokenRun run) const;
  int64_t HalfBytes(TokenRun run) const { return LayerBytes(run) / 2; }
  int64_t FileBytes(TokenRun run) const;
  // The first bytes of the file: the length of the header, then the header, whose size is a
  // multiple of 8 bytes.
  std::string Header(TokenRun run) const;

  // rows-{start}-{end}-{first digits of the digest}.safetensors
  static std::string FileName(TokenRun run, std::string_view sha256);
  // The part of the name before the digest.
  static std::string NamePrefix(TokenRun run);

 private:
  const ModelSpec spec_;
  const int64_t tokens_per_file_;
};

// client-{first digits of the digest}.bin
std::string ClientDataName(std::string_view sha256);
// Whether this may be the name of a file of a snapshot other than the manifest.
bool IsDataFileName(std::string_view name);

}  // namespace spillway

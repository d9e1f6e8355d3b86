#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/snapshot/layout.h"

namespace spillway {

inline constexpr char kManifestName[] = "manifest.json";
inline constexpr int64_t kManifestBytesMax = int64_t{16} << 20;
inline constexpr int64_t kClientDataBytesMax = int64_t{3} << 20;

// A file of rows, as a manifest names it.
struct RowsFile {
  TokenRun run;
  int64_t byte_count = 0;
  std::string sha256;  // 64 hexadecimal digits
};

struct ClientDataFile {
  int64_t byte_count = 0;
  std::string sha256;
};

// What a snapshot says of itself. Plain data.
struct Manifest {
  // DescribeModel of the model: a JSON object that is not looked into here.
  std::string model_json;
  // The API's messages Model and Sequence (policy and ttl), likewise, which say all of it.
  std::string model_message;
  std::string sequence_message;
  // Of the file of the model's hash weights; empty: it has none.
  std::string weights_sha256;
  int64_t token_count = 0;
  int64_t tokens_per_file = 0;
  std::vector<RowsFile> files;  // by token
  // What the client gave to keep.
  std::optional<ClientDataFile> client_data;
};

// The manifest as a file: JSON whose last member is the digest of all bytes before it.
std::string ToText(const Manifest& manifest);

// The manifest of a file's bytes. What it names may come from anybody: types, ranges and
// digests' form are checked, files follow one another from token 0 to token_count, as a
// SnapshotLayout of tokens_per_file cuts them, and their names follow from the rest. Whether
// that fits a model is CheckFits's. DATA_LOSS, saying what is wrong, but
// FAILED_PRECONDITION, reason SNAPSHOT_VERSION, for another version whose bytes are whole.
absl::StatusOr<Manifest> ParseManifest(std::string_view text);

// DATA_LOSS where the files cannot be those of such a model.
absl::Status CheckFits(const Manifest& manifest, const ModelSpec& spec);

}  // namespace spillway

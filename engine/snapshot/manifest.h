#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/snapshot/layout.h"

namespace spillway {

inline constexpr char kManifestName[] = "manifest.json";
inline constexpr int64_t kManifestBytesMax = int64_t{16} << 20;
inline constexpr int64_t kClientDataBytesMax = int64_t{3} << 20;

// A file of rows in the manifest.
struct RowsFile {
  TokenRun run;
  int64_t byte_count = 0;
  std::string sha256;  // 64 hexadecimal digits
};

struct ClientDataFile {
  int64_t byte_count = 0;
  std::string sha256;
};

// The description of a snapshot. Plain data.
struct Manifest {
  // The model as DescribeModel() returns it: a JSON object, which is not interpreted here.
  std::string model_json;
  // The complete API messages Model and Sequence (only policy and ttl), serialised. They are not
  // interpreted here either.
  std::string model_message;
  std::string sequence_message;
  // Digest of the file with the model's hash weights; empty: the model has none.
  std::string weights_sha256;
  int64_t token_count = 0;
  int64_t tokens_per_file = 0;
  std::vector<RowsFile> files;  // in the order of tokens
  // Data that the client stored with the snapshot.
  std::optional<ClientDataFile> client_data;
};

// The text of the manifest's file: JSON whose last member is the digest of all bytes before it.
std::string ToText(const Manifest& manifest);

// Parses the text of a manifest, which may come from an untrusted source. Checks types, ranges and
// the form of digests; that the files follow one another from token 0 to token_count, as a
// SnapshotLayout of tokens_per_file divides them; and that their names follow from the rest.
// CheckFits() checks whether this fits a model. DATA_LOSS says what is wrong. FAILED_PRECONDITION,
// reason SNAPSHOT_VERSION, for complete bytes of another version.
absl::StatusOr<Manifest> ParseManifest(std::string_view text);

// DATA_LOSS if the files cannot belong to such a model.
absl::Status CheckFits(const Manifest& manifest, const ModelSpec& spec);

}  // namespace spillway

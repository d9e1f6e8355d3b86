#include "engine/snapshot/layout.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/sha256.h"
#include "host/base/limits.h"

namespace spillway {
namespace {

constexpr int64_t kFileBytesMax = int64_t{64} << 20;
constexpr int64_t kLayerBytesMax = int64_t{8} << 20;
constexpr size_t kLengthBytes = 8;
constexpr int kPositionDigits = 10;
constexpr std::string_view kRowsPrefix = "rows-";
constexpr std::string_view kRowsSuffix = ".safetensors";
constexpr std::string_view kClientPrefix = "client-";
constexpr std::string_view kClientSuffix = ".bin";

std::string_view SafeTensorsType(DType type) {
  switch (type) {
    case DType::kF32:
      return "F32";
    case DType::kF16:
      return "F16";
    case DType::kBF16:
      return "BF16";
  }
  return "";
}

bool IsPosition(std::string_view text) {
  return text.size() == kPositionDigits && std::all_of(text.begin(), text.end(), [](char c) {
           return absl::ascii_isdigit(static_cast<unsigned char>(c));
         });
}

}  // namespace

int64_t SnapshotLayout::TokensPerFile(const ModelSpec& spec) {
  const int64_t layer_bytes = spec.kv_head_count * spec.row_bytes();  // of one token
  const int64_t count =
      std::min(kFileBytesMax / (layer_bytes * spec.layer_count), kLayerBytesMax / layer_bytes);
  const int64_t pages = count / kPageTokenCount * kPageTokenCount;
  return pages > 0 ? pages : std::max<int64_t>(count, 1);
}

TokenRun SnapshotLayout::Run(int64_t file, int64_t token_count) const {
  const int64_t start = file * tokens_per_file_;
  return {start, std::min(start + tokens_per_file_, token_count)};
}

int64_t SnapshotLayout::LayerBytes(TokenRun run) const {
  return spec_.kv_head_count * run.count() * spec_.row_bytes();
}

int64_t SnapshotLayout::FileBytes(TokenRun run) const {
  return static_cast<int64_t>(Header(run).size()) + spec_.layer_count * LayerBytes(run);
}

std::string SnapshotLayout::Header(TokenRun run) const {
  std::string json =
      absl::StrCat("{\"__metadata__\":{\"format\":\"spillway-snapshot\",", "\"token_start\":\"",
                   run.start, "\",\"token_end\":\"", run.end, "\"}");
  int64_t at = 0;
  const auto add = [&](int layer, const char* name, std::string_view type, int64_t width,
                       int64_t bytes) {
    absl::StrAppend(&json, ",\"layers.", layer, ".", name, "\":{\"dtype\":\"", std::string(type),
                    "\",\"shape\":[", spec_.kv_head_count, ",", run.count(), ",", width,
                    "],\"data_offsets\":[", at, ",", at + bytes, "]}");
    at += bytes;
  };
  for (int layer = 0; layer < spec_.layer_count; ++layer) {
    if (has_halves()) {
      for (const char* half : {"k", "v"}) {
        add(layer, half, SafeTensorsType(spec_.dtype), spec_.head_dim, HalfBytes(run));
      }
    } else {
      add(layer, "rows", "U8", spec_.row_bytes(), LayerBytes(run));
    }
  }
  json += '}';
  json.resize((json.size() + 7) / 8 * 8, ' ');
  std::string header(kLengthBytes, '\0');
  uint64_t length = json.size();
  for (char& byte : header) {
    byte = static_cast<char>(length & 0xFF);
    length >>= 8;
  }
  return header + json;
}

std::string SnapshotLayout::NamePrefix(TokenRun run) {
  return absl::StrFormat("%s%0*d-%0*d-", std::string(kRowsPrefix), kPositionDigits, run.start,
                         kPositionDigits, run.end);
}

std::string SnapshotLayout::FileName(TokenRun run, std::string_view sha256) {
  return absl::StrCat(NamePrefix(run), std::string(sha256.substr(0, kNameDigestDigits)),
                      std::string(kRowsSuffix));
}

std::string ClientDataName(std::string_view sha256) {
  return absl::StrCat(std::string(kClientPrefix), std::string(sha256.substr(0, kNameDigestDigits)),
                      std::string(kClientSuffix));
}

bool IsDataFileName(std::string_view name) {
  if (name.starts_with(kClientPrefix) && name.ends_with(kClientSuffix)) {
    name.remove_prefix(kClientPrefix.size());
    name.remove_suffix(kClientSuffix.size());
    return IsDigest(name, kNameDigestDigits);
  }
  if (!name.starts_with(kRowsPrefix) || !name.ends_with(kRowsSuffix)) return false;
  name.remove_prefix(kRowsPrefix.size());
  name.remove_suffix(kRowsSuffix.size());
  return name.size() == 2 * (kPositionDigits + 1) + kNameDigestDigits &&
         IsPosition(name.substr(0, kPositionDigits)) && name[kPositionDigits] == '-' &&
         IsPosition(name.substr(kPositionDigits + 1, kPositionDigits)) &&
         name[2 * kPositionDigits + 1] == '-' &&
         IsDigest(name.substr(2 * (kPositionDigits + 1)), kNameDigestDigits);
}

}  // namespace spillway

#include "engine/snapshot/manifest.h"

#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/errors.h"
#include "engine/sha256.h"
#include "host/base/limits.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kFormat[] = "spillway-snapshot";
constexpr int64_t kVersion = 1;
constexpr size_t kDigestDigits = 64;
// Limit on the nesting of the JSON. A valid manifest is flatter.
constexpr int kDepthMax = 10;
constexpr std::string_view kTailBegin = ",\n  \"sha256\": \"";
constexpr std::string_view kTailEnd = "\"\n}\n";
constexpr size_t kTailSize = kTailBegin.size() + kDigestDigits + kTailEnd.size();

absl::Status Damaged(std::string_view what) {
  return absl::DataLossError(absl::StrCat(kManifestName, ": ", std::string(what)));
}

// Checks that the object has exactly these members.
absl::Status CheckMembers(const Json& object, std::initializer_list<const char*> names,
                          std::string_view what) {
  if (!object.is_object() || object.size() != names.size()) {
    return Damaged(absl::StrCat(std::string(what), " has unexpected members"));
  }
  for (const char* name : names) {
    if (!object.contains(name)) {
      return Damaged(absl::StrCat(std::string(what), " has no \"", name, "\""));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> Integer(const Json& object, const char* name, int64_t low, int64_t high) {
  const Json& value = object.at(name);
  // The parser gives non-negative integers an unsigned type.
  if (!value.is_number_unsigned() || value.get<uint64_t>() > static_cast<uint64_t>(high) ||
      value.get<uint64_t>() < static_cast<uint64_t>(low)) {
    return Damaged(absl::StrCat("\"", name, "\" is not an integer in [", low, ", ", high, "]"));
  }
  return static_cast<int64_t>(value.get<uint64_t>());
}

absl::StatusOr<std::string> Digest(const Json& object, const char* name) {
  const Json& value = object.at(name);
  if (!value.is_string() || !IsDigest(value.get_ref<const std::string&>(), kDigestDigits)) {
    return Damaged(absl::StrCat("\"", name, "\" is not a SHA-256 digest"));
  }
  return value.get<std::string>();
}

absl::StatusOr<std::string> Base64(const Json& object, const char* name) {
  const Json& value = object.at(name);
  std::string bytes;
  if (!value.is_string() || !absl::Base64Unescape(value.get_ref<const std::string&>(), &bytes)) {
    return Damaged(absl::StrCat("\"", name, "\" is not base64"));
  }
  return bytes;
}

absl::Status CheckName(const Json& object, const std::string& name) {
  const Json& value = object.at("name");
  if (value.is_string() && value.get_ref<const std::string&>() == name) return absl::OkStatus();
  return Damaged(absl::StrCat("a file is not called ", name, ", as its digest and tokens require"));
}

// Checks the digest of the text before it.
absl::Status CheckDigest(std::string_view text) {
  if (text.size() < kTailSize) return Damaged("it is cut off");
  const std::string_view body = text.substr(0, text.size() - kTailSize);
  const std::string_view tail = text.substr(body.size());
  const std::string_view digest = tail.substr(kTailBegin.size(), kDigestDigits);
  if (!tail.starts_with(kTailBegin) || !tail.ends_with(kTailEnd) ||
      digest != Sha256::Of(std::string(body))) {
    return Damaged("its digest does not match its bytes");
  }
  return absl::OkStatus();
}

absl::StatusOr<Json> ParseJson(std::string_view text) {
  bool deep = false;
  const auto filter = [&deep](int depth, nlohmann::detail::parse_event_t, Json&) {
    deep |= depth > kDepthMax;
    return !deep;
  };
  Json json = Json::parse(text.begin(), text.end(), filter, /*allow_exceptions=*/false);
  if (deep) return Damaged("it is nested too deeply");
  if (json.is_discarded() || !json.is_object()) return Damaged("it is not a JSON object");
  return json;
}

absl::Status ParseFiles(const Json& list, Manifest& manifest) {
  const int64_t step = manifest.tokens_per_file;
  const int64_t count = manifest.token_count / step + (manifest.token_count % step != 0 ? 1 : 0);
  if (!list.is_array() || static_cast<int64_t>(list.size()) != count) {
    return Damaged(absl::StrCat("\"files\" are not ", count, " files"));
  }
  for (const Json& entry : list) {
    RETURN_IF_ERROR(
        CheckMembers(entry, {"name", "token_start", "token_end", "bytes", "sha256"}, "a file"));
    RowsFile file;
    const int64_t start = manifest.files.empty() ? 0 : manifest.files.back().run.end;
    const int64_t end = std::min(start + step, manifest.token_count);
    ASSIGN_OR_RETURN(file.run.start, Integer(entry, "token_start", start, start));
    ASSIGN_OR_RETURN(file.run.end, Integer(entry, "token_end", end, end));
    ASSIGN_OR_RETURN(file.byte_count, Integer(entry, "bytes", 0, INT64_MAX));
    ASSIGN_OR_RETURN(file.sha256, Digest(entry, "sha256"));
    RETURN_IF_ERROR(CheckName(entry, SnapshotLayout::FileName(file.run, file.sha256)));
    manifest.files.push_back(std::move(file));
  }
  return absl::OkStatus();
}

}  // namespace

std::string ToText(const Manifest& manifest) {
  Json json;
  json["format"] = kFormat;
  json["format_version"] = kVersion;
  json["model"] = Json::parse(manifest.model_json);
  json["model_message"] = absl::Base64Escape(manifest.model_message);
  json["weights_sha256"] = manifest.weights_sha256;
  json["sequence_message"] = absl::Base64Escape(manifest.sequence_message);
  json["token_count"] = manifest.token_count;
  json["tokens_per_file"] = manifest.tokens_per_file;
  json["client_data"] = nullptr;
  if (manifest.client_data) {
    const ClientDataFile& data = *manifest.client_data;
    json["client_data"] = {
        {"name", ClientDataName(data.sha256)}, {"bytes", data.byte_count}, {"sha256", data.sha256}};
  }
  json["files"] = Json::array();
  for (const RowsFile& file : manifest.files) {
    json["files"].push_back({{"name", SnapshotLayout::FileName(file.run, file.sha256)},
                             {"token_start", file.run.start},
                             {"token_end", file.run.end},
                             {"bytes", file.byte_count},
                             {"sha256", file.sha256}});
  }
  std::string text = json.dump(2);
  text.resize(text.size() - 2);  // "\n}"
  const std::string digest = Sha256::Of(text);
  absl::StrAppend(&text, std::string(kTailBegin), digest, std::string(kTailEnd));
  return text;
}

absl::StatusOr<Manifest> ParseManifest(std::string_view text) {
  if (static_cast<int64_t>(text.size()) > kManifestBytesMax) {
    return Damaged(absl::StrCat(text.size(), " bytes are more than ", kManifestBytesMax));
  }
  RETURN_IF_ERROR(CheckDigest(text));
  ASSIGN_OR_RETURN(const Json json, ParseJson(text));
  if (!json.contains("format") || json["format"] != kFormat || !json.contains("format_version")) {
    return Damaged("it does not belong to a snapshot");
  }
  if (json["format_version"] != kVersion) {
    return WithReason(
        absl::FailedPreconditionError(absl::StrCat(
            kManifestName, ": format_version ", json["format_version"].dump().substr(0, 20),
            " is not one that this daemon reads: ", kVersion)),
        Reason::kSnapshotVersion);
  }
  RETURN_IF_ERROR(CheckMembers(
      json,
      {"format", "format_version", "model", "model_message", "weights_sha256", "sequence_message",
       "token_count", "tokens_per_file", "client_data", "files", "sha256"},
      "it"));
  Manifest manifest;
  if (!json["model"].is_object()) return Damaged("\"model\" is not an object");
  manifest.model_json = json["model"].dump(-1, ' ', false, Json::error_handler_t::replace);
  ASSIGN_OR_RETURN(manifest.model_message, Base64(json, "model_message"));
  ASSIGN_OR_RETURN(manifest.sequence_message, Base64(json, "sequence_message"));
  if (json["weights_sha256"] != "") {
    ASSIGN_OR_RETURN(manifest.weights_sha256, Digest(json, "weights_sha256"));
  }
  ASSIGN_OR_RETURN(manifest.token_count, Integer(json, "token_count", 0, kTokenCountMax));
  ASSIGN_OR_RETURN(manifest.tokens_per_file, Integer(json, "tokens_per_file", 1, kTokenCountMax));
  if (!json["client_data"].is_null()) {
    const Json& entry = json["client_data"];
    RETURN_IF_ERROR(CheckMembers(entry, {"name", "bytes", "sha256"}, "\"client_data\""));
    ClientDataFile data;
    ASSIGN_OR_RETURN(data.byte_count, Integer(entry, "bytes", 0, kClientDataBytesMax));
    ASSIGN_OR_RETURN(data.sha256, Digest(entry, "sha256"));
    RETURN_IF_ERROR(CheckName(entry, ClientDataName(data.sha256)));
    manifest.client_data = std::move(data);
  }
  RETURN_IF_ERROR(ParseFiles(json["files"], manifest));
  return manifest;
}

absl::Status CheckFits(const Manifest& manifest, const ModelSpec& spec) {
  const int64_t most = SnapshotLayout::TokensPerFile(spec);
  if (manifest.tokens_per_file > most) {
    return Damaged(
        absl::StrCat("tokens_per_file ", manifest.tokens_per_file, " is above the model's ", most));
  }
  const SnapshotLayout layout(spec, manifest.tokens_per_file);
  for (const RowsFile& file : manifest.files) {
    const int64_t bytes = layout.FileBytes(file.run);
    if (file.byte_count == bytes) continue;
    return Damaged(absl::StrCat(SnapshotLayout::FileName(file.run, file.sha256), " has ",
                                file.byte_count, " bytes, of this model ", bytes));
  }
  return absl::OkStatus();
}

}  // namespace spillway

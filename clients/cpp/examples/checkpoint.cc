#include "checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "host/base/status_macros.h"

namespace {

using Json = nlohmann::json;

// So that the byte count of a matrix cannot overflow.
constexpr int64_t kDimensionMax = int64_t{1} << 24;
constexpr int64_t kLayerCountMax = 1024;
constexpr int64_t kHeadCountMax = 1024;
constexpr int64_t kHeadDimMax = 256;
constexpr uint64_t kJsonBytesMax = uint64_t{16} << 20;

template <typename... Text>
absl::Status Refuse(const Text&... text) {
  return absl::InvalidArgumentError(absl::StrCat(text...));
}

// A file from which ranges of bytes are read.
class File {
 public:
  explicit File(std::string path) : path_(std::move(path)) {}

  absl::Status Open() {
    std::error_code error;
    bytes_ = std::filesystem::file_size(path_, error);
    stream_.open(path_, std::ios::binary);
    if (error || !stream_) return absl::NotFoundError(absl::StrCat(path_, ": cannot be read"));
    return absl::OkStatus();
  }

  const std::string& path() const { return path_; }
  uint64_t bytes() const { return bytes_; }

  absl::Status Read(uint64_t start, uint64_t count, void* to) {
    if (start > bytes_ || count > bytes_ - start) {
      return Refuse(path_, ": has ", bytes_, " bytes, not ", count, " from ", start, " on");
    }
    stream_.seekg(static_cast<std::streamoff>(start));
    stream_.read(static_cast<char*>(to), static_cast<std::streamsize>(count));
    if (!stream_) return absl::DataLossError(absl::StrCat(path_, ": cannot be read to its end"));
    return absl::OkStatus();
  }

  // Reads an object. Drops values that are nested deeper than in a safetensors header.
  absl::StatusOr<Json> ReadJson(uint64_t start, uint64_t count) {
    if (count > kJsonBytesMax) {
      return Refuse(path_, ": JSON of ", count, " bytes is longer than ", kJsonBytesMax);
    }
    std::string text(count, '\0');
    RETURN_IF_ERROR(Read(start, count, text.data()));
    const auto flat = [](int depth, Json::parse_event_t, Json&) { return depth <= 3; };
    Json json = Json::parse(text, flat, /*allow_exceptions=*/false);
    if (!json.is_object()) return Refuse(path_, ": byte ", start, " begins no JSON object");
    return json;
  }

 private:
  const std::string path_;
  std::ifstream stream_;
  uint64_t bytes_ = 0;
};

// A member of an object; null if it does not exist.
Json Get(const Json& from, const std::string& member) {
  return from.is_object() && from.contains(member) ? from[member] : Json();
}

std::string Shown(const Json& value) { return value.dump().substr(0, 100); }

// A number in (0, max]. otherwise: the value if the member is missing; 0: the member is required.
template <typename T>
absl::StatusOr<T> Positive(const Json& from, const std::string& member, T max, T otherwise = 0) {
  const Json value = Get(from, member);
  if (value.is_null() && otherwise > 0) return otherwise;
  const bool fits = std::is_integral_v<T> ? value.is_number_unsigned() : value.is_number();
  if (fits && value > 0 && value <= max) return value.get<T>();
  return Refuse("config.json: ", member, " is ", Shown(value), ", not ",
                std::is_integral_v<T> ? "an integer" : "a number", " in (0, ", max, "]");
}

// Refuses a member that is set to any value other than `handled`, the only one that is supported.
absl::Status Only(const Json& from, const std::string& member, const Json& handled) {
  const Json value = Get(from, member);
  if (value.is_null() || value == handled) return absl::OkStatus();
  return Refuse("config.json: ", member, " is ", Shown(value), "; only ", Shown(handled),
                " is handled");
}

absl::StatusOr<Config> ParseConfig(const Json& json) {
  if (Get(json, "model_type") != "llama") {
    return Refuse("config.json: model_type is ", Shown(Get(json, "model_type")), ", not \"llama\"");
  }
  RETURN_IF_ERROR(Only(json, "hidden_act", "silu"));
  RETURN_IF_ERROR(Only(json, "attention_bias", false));
  RETURN_IF_ERROR(Only(json, "mlp_bias", false));
  RETURN_IF_ERROR(Only(json, "pretraining_tp", 1));
  RETURN_IF_ERROR(Only(json, "quantization_config", nullptr));
  RETURN_IF_ERROR(Only(json, "rope_scaling", nullptr));
  // transformers 5 puts the RoPE parameters into a separate object; earlier versions have them at
  // the top level.
  const Json given = Get(json, "rope_parameters");
  const Json& rope = given.is_null() ? json : given;
  if (!rope.is_object()) return Refuse("config.json: rope_parameters is ", Shown(rope));
  RETURN_IF_ERROR(Only(rope, "rope_type", "default"));
  RETURN_IF_ERROR(Only(rope, "partial_rotary_factor", 1));

  Config config;
  ASSIGN_OR_RETURN(config.vocabulary_size, Positive(json, "vocab_size", kDimensionMax));
  ASSIGN_OR_RETURN(config.hidden_size, Positive(json, "hidden_size", kDimensionMax));
  ASSIGN_OR_RETURN(config.intermediate_size, Positive(json, "intermediate_size", kDimensionMax));
  ASSIGN_OR_RETURN(config.layer_count, Positive(json, "num_hidden_layers", kLayerCountMax));
  ASSIGN_OR_RETURN(config.head_count, Positive(json, "num_attention_heads", kHeadCountMax));
  ASSIGN_OR_RETURN(config.kv_head_count,
                   Positive(json, "num_key_value_heads", kHeadCountMax, config.head_count));
  ASSIGN_OR_RETURN(config.head_dim,
                   Positive(json, "head_dim", kHeadDimMax, config.hidden_size / config.head_count));
  ASSIGN_OR_RETURN(config.rms_norm_eps, Positive(json, "rms_norm_eps", 1.0F, 1e-6F));
  ASSIGN_OR_RETURN(config.rope_theta, Positive(rope, "rope_theta", 1e12F, 1e4F));
  const Json tied = Get(json, "tie_word_embeddings");
  if (!tied.is_null() && !tied.is_boolean()) {
    return Refuse("config.json: tie_word_embeddings is ", Shown(tied), ", not true or false");
  }
  config.tied = tied == true;
  return config;
}

// A safetensors file: 8 bytes with the length of the header, the header in JSON, the bytes of the
// tensors.
class SafeTensors {
 public:
  explicit SafeTensors(const std::string& path) : file_(path) {}

  absl::Status Open() {
    RETURN_IF_ERROR(file_.Open());
    uint64_t header_bytes = 0;  // little endian, like the host
    RETURN_IF_ERROR(file_.Read(0, sizeof(header_bytes), &header_bytes));
    ASSIGN_OR_RETURN(header_, file_.ReadJson(sizeof(header_bytes), header_bytes));
    // Within the file, because the header was read.
    data_start_ = sizeof(header_bytes) + header_bytes;
    return absl::OkStatus();
  }

  // Loads a tensor of shape [rows, columns]; if rows is 0, a tensor of shape [columns], as one row.
  // All elements must be finite. REQUIRES: both are at most kDimensionMax.
  absl::StatusOr<Matrix> Load(const std::string& name, int64_t rows, int64_t columns) {
    const Json tensor = Get(header_, name);
    const Json dtype = Get(tensor, "dtype"), shape = Get(tensor, "shape");
    const Json wanted = rows == 0 ? Json::array({columns}) : Json::array({rows, columns});
    if (shape != wanted || (dtype != "F32" && dtype != "BF16")) {
      return Refuse(file_.path(), ": ", name, " is ", Shown(dtype), " ", Shown(shape),
                    ", not F32 or BF16 ", Shown(wanted));
    }
    rows = std::max<int64_t>(rows, 1);
    const auto bytes = static_cast<uint64_t>(rows * columns * (dtype == "F32" ? 4 : 2));
    const Json offsets = Get(tensor, "data_offsets");
    const uint64_t data_bytes = file_.bytes() - data_start_;
    if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
        !offsets[1].is_number_unsigned() || offsets[1] > data_bytes || offsets[0] > offsets[1] ||
        offsets[1].get<uint64_t>() - offsets[0].get<uint64_t>() != bytes) {
      return Refuse(file_.path(), ": ", name, " has data_offsets ", Shown(offsets), ", not ", bytes,
                    " bytes within ", data_bytes);
    }
    const uint64_t start = data_start_ + offsets[0].get<uint64_t>();
    Matrix matrix(rows, columns);
    if (dtype == "F32") {
      RETURN_IF_ERROR(file_.Read(start, bytes, matrix.data()));
    } else {
      Eigen::Matrix<Eigen::bfloat16, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor> narrow(
          rows, columns);
      RETURN_IF_ERROR(file_.Read(start, bytes, narrow.data()));
      matrix = narrow.cast<float>();
    }
    if (!matrix.allFinite()) return Refuse(file_.path(), ": ", name, " has an infinity or NaN");
    return matrix;
  }

 private:
  File file_;
  Json header_;
  uint64_t data_start_ = 0;
};

}  // namespace

absl::StatusOr<Checkpoint> LoadCheckpoint(const std::string& folder) {
  File file(folder + "/config.json");
  RETURN_IF_ERROR(file.Open());
  ASSIGN_OR_RETURN(const Json json, file.ReadJson(0, file.bytes()));
  Checkpoint made;
  ASSIGN_OR_RETURN(made.config, ParseConfig(json));
  SafeTensors tensors(folder + "/model.safetensors");
  RETURN_IF_ERROR(tensors.Open());

  const auto& [vocabulary, hidden, intermediate, layer_count, heads, kv_heads, dim, eps, theta,
               tied] = made.config;
  ASSIGN_OR_RETURN(made.embedding, tensors.Load("model.embed_tokens.weight", vocabulary, hidden));
  if (!tied) {
    ASSIGN_OR_RETURN(made.head, tensors.Load("lm_head.weight", vocabulary, hidden));
  }
  ASSIGN_OR_RETURN(made.norm, tensors.Load("model.norm.weight", 0, hidden));
  for (int64_t i = 0; i < layer_count; ++i) {
    const auto load = [&, i](const char* name, int64_t rows, int64_t columns) {
      return tensors.Load(absl::StrCat("model.layers.", i, ".", name, ".weight"), rows, columns);
    };
    Layer& layer = made.layers.emplace_back();
    ASSIGN_OR_RETURN(layer.attention_norm, load("input_layernorm", 0, hidden));
    ASSIGN_OR_RETURN(layer.q, load("self_attn.q_proj", heads * dim, hidden));
    ASSIGN_OR_RETURN(layer.k, load("self_attn.k_proj", kv_heads * dim, hidden));
    ASSIGN_OR_RETURN(layer.v, load("self_attn.v_proj", kv_heads * dim, hidden));
    ASSIGN_OR_RETURN(layer.o, load("self_attn.o_proj", hidden, heads * dim));
    ASSIGN_OR_RETURN(layer.mlp_norm, load("post_attention_layernorm", 0, hidden));
    ASSIGN_OR_RETURN(layer.gate, load("mlp.gate_proj", intermediate, hidden));
    ASSIGN_OR_RETURN(layer.up, load("mlp.up_proj", intermediate, hidden));
    ASSIGN_OR_RETURN(layer.down, load("mlp.down_proj", hidden, intermediate));
  }
  return made;
}

#include <string>

#include "absl/strings/str_cat.h"
#include "cli/commands.h"
#include "cli/json.h"
#include "cli/output.h"

namespace spillway::cli {
namespace {

// Short name of the way in which the model's keys become codes.
std::string HashName(const v1::HashWeights& weights) {
  switch (weights.kind_case()) {
    case v1::HashWeights::kRotation:
      // The bits of keys and, if there are codes of values, of values: rotation:3+2.
      return absl::StrCat("rotation:", weights.rotation().bits_per_dim(),
                          weights.rotation().value_bits() > 0
                              ? absl::StrCat("+", weights.rotation().value_bits())
                              : "");
    case v1::HashWeights::kMlp:
      return absl::StrCat("mlp:", weights.mlp().hash_bits());
    case v1::HashWeights::KIND_NOT_SET:
      return "none";
  }
  return "unknown";
}

Json ModelJson(const v1::Model& model) {
  return {{"name", model.name()},
          {"layer_count", model.layer_count()},
          {"query_head_count", model.query_head_count()},
          {"kv_head_count", model.kv_head_count()},
          {"head_dim", model.head_dim()},
          {"dtype", DTypeName(model.dtype())},
          {"softmax_scale", model.softmax_scale()},
          {"hash", HashName(model.hash_weights())},
          {"resident_sample_fraction", model.resident_sample_fraction()},
          {"first_layer", model.first_layer()},
          {"first_kv_head", model.first_kv_head()},
          {"ready", model.ready()},
          {"row_bytes_per_token", model.row_bytes_per_token()},
          {"index_bytes_per_token", model.index_bytes_per_token()},
          {"create_time", TimeJson(model.has_create_time(), model.create_time())}};
}

Json SequenceJson(const v1::Sequence& sequence) {
  return {{"name", sequence.name()},
          {"model", sequence.model()},
          {"token_count", sequence.token_count()},
          {"generation", sequence.generation()},
          {"row_bytes", sequence.row_bytes()},
          {"index_bytes", sequence.index_bytes()},
          {"create_time", TimeJson(sequence.has_create_time(), sequence.create_time())},
          {"expire_time", TimeJson(sequence.has_expire_time(), sequence.expire_time())},
          {"named", sequence.named()},
          {"abandoned", sequence.abandoned()},
          {"sealed", sequence.sealed()}};
}

// What keeps the sequence until its ttl ends. "nobody": it is deleted earlier, when the grace time
// ends.
std::string KeptBy(const v1::Sequence& sequence) {
  if (sequence.named()) return "name";
  return sequence.abandoned() ? "nobody" : "client";
}

}  // namespace

absl::Status Models(Client& client, const CallOptions& call, const Output& output) {
  const absl::StatusOr<std::vector<v1::Model>> models = client.ListModels(call);
  if (!models.ok()) return models.status();
  if (output.json) {
    Json list = Json::array();
    for (const v1::Model& model : *models) list.push_back(ModelJson(model));
    output.out << Json{{"models", std::move(list)}}.dump(2) << '\n';
    return absl::OkStatus();
  }
  if (models->empty()) {
    output.out << "no models\n";
    return absl::OkStatus();
  }
  Table table(
      {"MODEL", "LAYERS", "HEADS", "DIM", "DTYPE", "HASH", "ROWS/TOKEN", "IDX/TOKEN", "READY"});
  for (const v1::Model& model : *models) {
    table.AddRow({ShortName(model.name()), absl::StrCat(model.layer_count()),
                  absl::StrCat(model.query_head_count(), "/", model.kv_head_count()),
                  absl::StrCat(model.head_dim()), DTypeName(model.dtype()),
                  HashName(model.hash_weights()), FormatBytes(model.row_bytes_per_token()),
                  FormatBytes(model.index_bytes_per_token()), model.ready() ? "yes" : "no"});
  }
  table.Print(output.out);
  return absl::OkStatus();
}

absl::Status Sequences(Client& client, const std::string& model, const CallOptions& call,
                       const Output& output) {
  const std::string name = model.empty() ? "" : FullName("models", model);
  const absl::StatusOr<std::vector<v1::Sequence>> sequences = client.ListSequences(name, call);
  if (!sequences.ok()) return sequences.status();
  if (output.json) {
    Json list = Json::array();
    for (const v1::Sequence& sequence : *sequences) list.push_back(SequenceJson(sequence));
    output.out << Json{{"sequences", std::move(list)}}.dump(2) << '\n';
    return absl::OkStatus();
  }
  if (sequences->empty()) {
    output.out << "no sequences\n";
    return absl::OkStatus();
  }
  const absl::Time now = absl::Now();
  Table table({"SEQUENCE", "MODEL", "TOKENS", "MEMORY", "AGE", "KEPT BY", "EXPIRES IN"});
  for (const v1::Sequence& sequence : *sequences) {
    table.AddRow(
        {ShortName(sequence.name()), ShortName(sequence.model()),
         FormatCount(sequence.token_count()),
         FormatBytes(sequence.row_bytes() + sequence.index_bytes()),
         FormatAge(now - ToTime(sequence.create_time())), KeptBy(sequence),
         sequence.has_expire_time() ? FormatAge(ToTime(sequence.expire_time()) - now) : "never"});
  }
  table.Print(output.out);
  return absl::OkStatus();
}

}  // namespace spillway::cli

#include "bench/trace_files.h"

#include <fstream>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace spillway::bench {

absl::StatusOr<TraceFiles> TraceFiles::Open(const std::string& folder) {
  std::ifstream file(folder + "/meta.json");
  auto meta = nlohmann::ordered_json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!meta.is_object()) return absl::InvalidArgumentError(folder + "/meta.json is no JSON object");
  ModelSpec spec;
  spec.layer_count = 1;
  spec.query_head_count = meta.at("query_head_count");
  spec.kv_head_count = meta.at("kv_head_count");
  spec.head_dim = meta.at("head_dim");
  spec.dtype = DType::kBF16;
  const std::vector<FieldError> wrong = Normalize(spec);
  if (!wrong.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(folder, "/meta.json: ", wrong[0].field, ": ", wrong[0].description));
  }
  auto k = MappedFile::Open(folder + "/k.bf16");
  if (!k.ok()) return k.status();
  auto v = MappedFile::Open(folder + "/v.bf16");
  if (!v.ok()) return v.status();
  auto queries = MappedFile::Open(folder + "/queries.f32");
  if (!queries.ok()) return queries.status();
  const int64_t token_count = meta.at("token_count");
  const int64_t bytes = token_count * spec.kv_head_count * spec.row_bytes() / 2;
  if (k->bytes() != bytes || v->bytes() != bytes) {
    return absl::InvalidArgumentError(folder + ": the sizes of K and V are not those of meta.json");
  }
  return TraceFiles{std::move(meta), spec,          token_count,
                    *std::move(k),   *std::move(v), *std::move(queries)};
}

}  // namespace spillway::bench

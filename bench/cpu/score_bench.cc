// Compares the time of a score pass (scores, threshold, compaction) over the codes of one KV head
// with the time of only reading these codes.
//
// The keys are those of the first KV head in the data directory, repeated until there are as many
// as requested. The query heads are the first group of the first query. Caches are flushed before
// each measurement, because between two attends of a model they hold other data. Every result is
// compared with a plain reference before times are reported. Writes one JSON object to standard
// output.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/cpu/fixture.h"
#include "bench/mapped_file.h"
#include "host/base/status_macros.h"
#include "host/core/page_index.h"
#include "host/core/quantiser.h"
#include "host/cpu/attend_context.h"
#include "host/cpu/score_pass.h"
#include "host/policy/methods.h"
#include "nlohmann/json.hpp"
#include "tests/reference/ranking.h"

namespace spillway::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kHeadDim = 128;
constexpr int kQueryHeads = 4;

struct Options {
  std::string directory;
  int64_t key_count = int64_t{1} << 20;
  int repetitions = 11;
};

double Seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

float FromBF16(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

// The codes of one KV head on a device, and one query for its group of query heads.
class Scored {
 public:
  absl::Status Create(const Options& options, Selector selector, int bits_per_dim) {
    auto k = MappedFile::Open(options.directory + "/k.bf16");
    if (!k.ok()) return k.status();
    auto queries = MappedFile::Open(options.directory + "/queries.f32");
    if (!queries.ok()) return queries.status();
    std::ifstream meta_file(options.directory + "/meta.json");
    const Json meta = Json::parse(meta_file);
    const int64_t tokens = meta.at("token_count");
    if (meta.at("head_dim") != kHeadDim) return absl::InvalidArgumentError("head_dim is not 128");
    q_.resize(kQueryHeads * kHeadDim);
    std::memcpy(q_.data(), queries->data(), q_.size() * sizeof(float));

    ModelSpec spec;
    spec.layer_count = 1;
    spec.query_head_count = kQueryHeads;
    spec.kv_head_count = 1;
    spec.head_dim = kHeadDim;
    spec.hash.bits_per_dim = bits_per_dim;
    ASSIGN_OR_RETURN(
        fixture_,
        Fixture::Create(spec, 0, 3 * options.key_count * 2 * kHeadDim * 2 + (int64_t{1} << 30)));
    for (int64_t at = 0; at < options.key_count; at += tokens) {
      absl::Status status = fixture_->Append(k->data(), k->data(), tokens, 0,
                                             std::min(tokens, options.key_count - at));
      if (!status.ok()) return status;
    }
    attend_.rows = &fixture_->rows();
    attend_.policy = DefaultPolicy(fixture_->model().spec());
    attend_.policy.selector = selector;
    attend_.q = reinterpret_cast<const std::byte*>(q_.data());
    attend_.query_count = 1;
    attend_.visible = {options.key_count};
    workspaces_ = std::make_unique<WorkspacePool>(&fixture_->budget());
    context_.shapes = &model().spec();
    context_.model = &model();
    context_.index = &static_cast<CpuSequence&>(fixture_->sequence()).layers[0];
    context_.attend = &attend_;
    context_.result = &result_;
    context_.workspaces = workspaces_.get();
    return absl::OkStatus();
  }

  // The measured work: scores, histogram, threshold, compaction. Returns the heavy set.
  absl::StatusOr<std::vector<uint32_t>> Pass() {
    const GroupQueries queries(context_, 0, context_.spec().group(), 0, 1);
    const ScoredKeys keys{&context_, &queries, 0, 0, begin(), end()};
    const std::unique_ptr<KeyScorer> scorer = MakeScorer(keys);
    ScorePass pass(keys, attend_.policy.selector, /*by_mass=*/false);
    RETURN_IF_ERROR(pass.Score(*scorer));
    return pass.TakeHeavy(HeavySet::Of(heavy_count(), false, pass.stray_count(), 0, 0, 0));
  }

  std::vector<const std::byte*> Spans() const {
    std::vector<const std::byte*> spans;
    const PageTable& codes = context_.index->codes[0];
    for (int64_t p = 0; p < codes.page_count(); ++p) spans.push_back(codes.Page(p));
    return spans;
  }

  const CpuModel& model() const { return static_cast<const CpuModel&>(fixture_->model()); }
  Fixture& fixture() { return *fixture_; }
  int64_t begin() const { return attend_.policy.sink_token_count; }
  int64_t end() const { return attend_.visible[0] - attend_.policy.window_token_count; }
  int heavy_count() const { return static_cast<int>(attend_.policy.heavy_count); }
  double softmax_scale() const { return model().spec().softmax_scale; }
  // The query of a head after the rotation.
  std::vector<float> RotatedQuery(int head) const {
    std::vector<float> rotated(kHeadDim);
    Rotate(model().encode_params(0), q_.data() + head * kHeadDim, rotated.data());
    return rotated;
  }
  // The code of a key at one dimension.
  int Code(int64_t token, int dim) const {
    const CodeLayout& layout = model().layout();
    const auto* words = InPage<uint32_t>(token / kPageTokenCount, 0);
    const int tile = static_cast<int>(token % kPageTokenCount / kTileTokenCount);
    int code = 0;
    int bits = 0;
    for (int part = 0; part < layout.parts; ++part) {
      const int per_word = layout.word_dims(part);
      const uint32_t word = words[layout.tile_offset(part, tile) +
                                  dim / per_word * kTileTokenCount + token % kTileTokenCount];
      const uint32_t field = word >> layout.shift(part, dim % per_word);
      code |= static_cast<int>(field & ((1u << layout.width[part]) - 1)) << bits;
      bits += layout.width[part];
    }
    return code;
  }
  double Factor(int64_t token) const {
    const auto* factors =
        InPage<uint16_t>(token / kPageTokenCount, model().layout().factor_offset_bytes());
    return FromBF16(factors[token % kPageTokenCount]);
  }
  // The part of a query head's logits that comes from the page's centre.
  double CentreLogit(int head, int64_t page) const {
    const auto* centre = InPage<uint16_t>(page, model().layout().centre_offset_bytes());
    double dot = 0;
    for (int j = 0; j < kHeadDim; ++j) dot += double{q_[head * kHeadDim + j]} * FromBF16(centre[j]);
    return softmax_scale() * dot;
  }
  uint8_t Norm(int64_t token) const {
    const auto* norms =
        InPage<uint8_t>(token / kPageTokenCount, model().layout().norm_offset_bytes());
    return norms[token % kPageTokenCount];
  }
  int value_floor() const { return context_.index->Statistics(0)->value_floor; }

 private:
  // Address of the byte at `offset` in a page of the index.
  template <typename T>
  const T* InPage(int64_t page, int64_t offset) const {
    return reinterpret_cast<const T*>(context_.index->codes[0].Page(page) + offset);
  }

  std::unique_ptr<Fixture> fixture_;
  std::unique_ptr<WorkspacePool> workspaces_;
  std::vector<float> q_;
  AttendQuery attend_;
  AttendResult result_;
  AttendContext context_;
};

// Counts the matching bits of every candidate one by one, and compares the heavy set with the
// tokens that have the most. Among equal counts, newer tokens come first.
absl::Status CheckHamming(const Scored& scored, const std::vector<uint32_t>& heavy) {
  std::vector<int> set(kHeadDim);
  for (int g = 0; g < kQueryHeads; ++g) {
    const std::vector<float> rotated = scored.RotatedQuery(g);
    for (int j = 0; j < kHeadDim; ++j) set[j] += rotated[j] >= 0;
  }
  std::vector<std::pair<int, int64_t>> ranked;
  for (int64_t t = scored.begin(); t < scored.end(); ++t) {
    int matches = 0;
    for (int j = 0; j < kHeadDim; ++j) {
      matches += scored.Code(t, j) != 0 ? set[j] : kQueryHeads - set[j];
    }
    ranked.push_back({matches, t});
  }
  const auto end = ranked.begin() + scored.heavy_count();
  std::partial_sort(ranked.begin(), end, ranked.end(), std::greater<>());
  std::vector<uint32_t> expected;
  for (auto it = ranked.begin(); it != end; ++it) {
    expected.push_back(static_cast<uint32_t>(it->second));
  }
  std::sort(expected.begin(), expected.end());
  if (heavy != expected) return absl::InternalError("the heavy set is not the reference's");
  return absl::OkStatus();
}

// Computes group scores in double precision from the same codes, centres, norms and 4-bit query.
// No token outside the heavy set may have a higher bin than a token inside, after a tolerance for
// rounding in fp32.
absl::Status CheckAsymmetric(const Scored& scored, const std::vector<uint32_t>& heavy) {
  const int bits = scored.model().spec().hash.bits_per_dim;
  const double step = QuantiserStep(bits);
  const double middle = 0.5 * ((1 << bits) - 1);
  const int64_t n = scored.end() - scored.begin();
  const int64_t pages = (scored.end() + kPageTokenCount - 1) / kPageTokenCount;
  std::vector<std::vector<double>> logits, centres;
  for (int g = 0; g < kQueryHeads; ++g) {
    const std::vector<float> rotated = scored.RotatedQuery(g);
    float largest = 0;
    for (float x : rotated) largest = std::max(largest, std::fabs(x));
    const double s = largest / 7.5;
    std::vector<double> query(kHeadDim);
    for (int j = 0; j < kHeadDim; ++j) {
      query[j] = (std::clamp(std::nearbyint(rotated[j] / s - 0.5), -8.0, 7.0) + 0.5) * s;
    }
    std::vector<double>& of_pages = centres.emplace_back(pages);
    for (int64_t p = 0; p < pages; ++p) of_pages[p] = scored.CentreLogit(g, p);
    std::vector<double>& head = logits.emplace_back(scored.end());
    for (int64_t t = scored.begin(); t < scored.end(); ++t) {
      double dot = 0;
      for (int j = 0; j < kHeadDim; ++j) {
        dot += query[j] * (scored.Code(t, j) - middle) * step;
      }
      head[t] = scored.softmax_scale() * scored.Factor(t) * dot + of_pages[t / kPageTokenCount];
    }
  }
  std::vector<bool> strays(scored.end());
  int64_t stray_count = 0;
  for (int64_t t = scored.begin(); t < scored.end(); ++t) {
    strays[t] = scored.Norm(t) == kStrayNorm;
    stray_count += strays[t];
  }
  const std::vector<double> score =
      reference::GroupScores(logits, scored.begin(), scored.end(), strays, centres);
  if (static_cast<int64_t>(heavy.size()) != scored.heavy_count() + stray_count ||
      !std::is_sorted(heavy.begin(), heavy.end())) {
    return absl::InternalError("the heavy set's size or order is wrong");
  }
  const auto weighed = [&](int bin, int64_t i) {
    return WeighBin(bin, scored.Norm(scored.begin() + i), scored.value_floor());
  };
  int least = kStrayBin;
  std::vector<bool> taken(n, false);
  for (uint32_t t : heavy) {
    const int64_t i = t - scored.begin();
    taken[i] = true;
    least = std::min(least, weighed(reference::RangeOf(score[i], 1e-4).high, i));
  }
  for (int64_t i = 0; i < n; ++i) {
    if (!taken[i] && weighed(reference::RangeOf(score[i], 1e-4).low, i) > least) {
      return absl::InternalError(absl::StrCat("token ", scored.begin() + i, " was left out"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Json> MeasurePass(Scored& scored, const Options& options, bool hamming) {
  absl::StatusOr<std::vector<uint32_t>> heavy = scored.Pass();
  if (!heavy.ok()) return heavy.status();
  RETURN_IF_ERROR(hamming ? CheckHamming(scored, *heavy) : CheckAsymmetric(scored, *heavy));

  const CodeLayout& layout = scored.model().layout();
  const std::vector<const std::byte*> spans = scored.Spans();
  // `hamming` does not read the factors.
  const int64_t span_bytes = hamming ? layout.factor_offset_bytes() : layout.page_bytes();
  Json rows = Json::array();
  const int all_threads = scored.fixture().device().info().thread_count;
  std::vector<int> counts{1};
  if (all_threads > 1) counts.push_back(all_threads);
  CacheFlush flush;
  for (int thread_count : counts) {
    tbb::task_arena threads(thread_count);
    std::vector<double> reads;
    std::vector<double> passes;
    for (int i = -1; i < options.repetitions; ++i) {  // the first warms up
      const double read = PlainReadSeconds(threads, spans, span_bytes, flush);
      flush.Run();
      const double pass = Seconds([&] { threads.execute([&] { heavy = scored.Pass(); }); });
      if (!heavy.ok()) return heavy.status();
      if (i < 0) continue;
      reads.push_back(read);
      passes.push_back(pass);
    }
    const double per_million = 1e6 / static_cast<double>(options.key_count);
    const double bytes = static_cast<double>(spans.size()) * static_cast<double>(span_bytes);
    rows.push_back({{"selector", hamming ? "hamming" : "asymmetric"},
                    {"bits_per_dim", scored.model().spec().hash.bits_per_dim},
                    {"thread_count", thread_count},
                    {"key_count", options.key_count},
                    {"code_bytes", bytes},
                    {"us_per_million_keys", 1e6 * per_million * Median(passes)},
                    {"read_us_per_million_keys", 1e6 * per_million * Median(reads)},
                    {"read_gb_per_s", 1e-9 * bytes / Median(reads)},
                    {"share_of_read_rate", Median(reads) / Median(passes)}});
  }
  return rows;
}

absl::StatusOr<Json> Run(const Options& options) {
  Json result{{"plain_read", kPlainReadHow}, {"passes", Json::array()}};
  for (const int bits : {1, 2, HashSpec().bits_per_dim}) {
    const bool hamming = bits == 1;
    if (hamming && FindMethod(Selector::kHamming) == nullptr) continue;
    Scored scored;
    absl::Status status =
        scored.Create(options, hamming ? Selector::kHamming : Selector::kAsymmetric, bits);
    if (!status.ok()) return status;
    absl::StatusOr<Json> rows = MeasurePass(scored, options, hamming);
    if (!rows.ok()) return rows.status();
    for (Json& row : *rows) result["passes"].push_back(std::move(row));
  }
  return result;
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Scores codes and measures it against reading them.", "score_bench");
  app.add_option("directory", options.directory, "data made by bench/trace_data.py")->required();
  app.add_option("--keys", options.key_count, "keys of the KV head")
      ->check(CLI::Range(int64_t{4096}, int64_t{1} << 26))
      ->capture_default_str();
  app.add_option("--repetitions", options.repetitions, "medians are over so many")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const absl::StatusOr<Json> result = Run(options);
  if (!result.ok()) {
    std::cerr << "score_bench: " << result.status() << '\n';
    return 1;
  }
  std::cout << result->dump(2) << '\n';
  return 0;
}

}  // namespace
}  // namespace spillway::bench

int main(int argc, char** argv) { return spillway::bench::Main(argc, argv); }

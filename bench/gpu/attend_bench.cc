// Measures attends of one layer on a GPU, and how much time each of their stages takes.
//
// Without --data, rows are random, and policies have fixed budgets. With --data, rows and queries
// are like those of a real model, and the default policy is used. Before attends are timed, outputs
// are compared with weighted attention in fp64 over the rows that the attend selects. With --data,
// they are also compared with dense attention: this gives the true errors, which the certificates
// estimate. The GPU's caches are flushed before each timed attend. Writes one JSON object per line.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <iostream>
#include <iterator>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/gpu/attend_check.h"
#include "bench/gpu/attend_data.h"
#include "bench/gpu/attend_measure.h"
#include "bench/gpu/gpu_fixture.h"
#include "host/base/status_macros.h"
#include "nlohmann/json.hpp"

namespace spillway::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kChunkTokens = 32768;

struct Options {
  std::vector<int64_t> lengths;
  std::string data;
  int repetitions = 15;
  std::string only;
  int bits_per_dim = HashSpec().bits_per_dim;
};

struct NamedPolicy {
  std::string name;
  Policy policy;
  double spread = 1;  // of random queries; see RandomData::Query
};

bool IsWanted(const NamedPolicy& what, const Options& options) {
  return what.name.find(options.only) != std::string::npos;
}

void Print(const Json& json) { std::cout << json.dump() << std::endl; }

double Mean(const std::vector<double>& x) {
  double sum = 0;
  for (const double value : x) sum += value;
  return sum / static_cast<double>(x.size());
}

// The share of the indices [0, count) for which `holds` is true.
double Share(size_t count, const std::function<bool(size_t)>& holds) {
  size_t found = 0;
  for (size_t i = 0; i < count; ++i) found += holds(i) ? 1 : 0;
  return static_cast<double>(found) / static_cast<double>(count);
}

template <typename Data>
absl::Status AppendTo(GpuFixture& fixture, const Data& data, const std::string& kind, int64_t n) {
  const int64_t first = fixture.rows().token_count();
  GpuFixture::Appended sum;
  RowChunk chunk;
  while (fixture.rows().token_count() < n) {
    const int64_t start = fixture.rows().token_count();
    const int64_t count = std::min(kChunkTokens, n - start);
    data.Read(start, count, chunk);
    const auto appended = fixture.Append(chunk.k.data(), chunk.v.data(), count);
    if (!appended.ok()) return appended.status();
    sum.seconds += appended->seconds;
    sum.device_seconds += appended->device_seconds;
    sum.pin_seconds += appended->pin_seconds;
  }
  const ModelSpec& spec = fixture.spec();
  const auto bytes = static_cast<double>((n - first) * spec.kv_head_count * spec.row_bytes());
  Print({{"name", "append"},
         {"data", kind},
         {"tokens", n - first},
         {"seconds", sum.seconds},
         {"device_seconds", sum.device_seconds},
         {"gb_per_s", bytes / sum.seconds * 1e-9},
         {"pin_seconds", sum.pin_seconds}});
  return absl::OkStatus();
}

Json StageJson(const Timing& timing) {
  Json json = Json::object();
  for (const StageTime& stage : timing.stages) json[stage.name] = stage.us;
  return json;
}

bool IsScoring(const std::string& stage) { return stage == "score"; }
bool IsGather(const std::string& stage) { return stage.ends_with("gather"); }

absl::Status MeasureRandom(GpuFixture& fixture, const RandomData& data, const Options& options,
                           const NamedPolicy& what, int64_t n) {
  if (!IsWanted(what, options)) return absl::OkStatus();
  const auto request = [&](int seed) {
    return AttendRequest{what.policy, data.Query(static_cast<uint64_t>(seed), what.spread), n};
  };
  const auto checked = Check(fixture, what.name, request(7));
  if (!checked.ok()) return checked.status();
  const auto timing = Time(fixture, options.repetitions, [&](int i) { return request(100 + i); });
  if (!timing.ok()) return timing.status();
  Print({{"name", what.name},
         {"data", "random"},
         {"bits_per_dim", fixture.spec().hash.bits_per_dim},
         {"tokens", n},
         {"us", timing->us},
         {"rows", timing->row_count},
         {"row_bytes", timing->row_count * fixture.spec().row_bytes()},
         {"moved_rows", timing->moved_count},
         {"checked_error", checked->error},
         {"stages", StageJson(*timing)}});
  return absl::OkStatus();
}

// A heavy set of fixed size, without a tail.
Policy TopPolicy() {
  Policy top;
  top.tail = Tail::kNone;
  top.heavy_kind = HeavyKind::kCount;
  top.heavy_count = 64;
  return top;
}

// Compares a decode step, which appends a token and attends, with the attend alone.
absl::Status MeasureStep(GpuFixture& fixture, const RandomData& data, const Options& options) {
  NamedPolicy what{"decode step, asymmetric top 64", TopPolicy(), 1};
  if (!IsWanted(what, options)) return absl::OkStatus();
  RowChunk token;
  const auto request = [&](int seed) {
    return AttendRequest{what.policy, data.Query(static_cast<uint64_t>(seed), what.spread),
                         fixture.rows().token_count()};
  };
  const auto step = [&](int seed) {
    AttendRequest r = request(seed);
    data.Read(r.visible++, 1, token);
    r.k = token.k.data();
    r.v = token.v.data();
    return r;
  };
  const auto stepped = Time(fixture, options.repetitions, [&](int i) { return step(100 + i); });
  if (!stepped.ok()) return stepped.status();
  const auto checked = Check(fixture, what.name, request(7));
  if (!checked.ok()) return checked.status();
  const auto alone = Time(fixture, options.repetitions, [&](int i) { return request(100 + i); });
  if (!alone.ok()) return alone.status();
  Print({{"name", what.name},
         {"data", "random"},
         {"bits_per_dim", fixture.spec().hash.bits_per_dim},
         {"tokens", fixture.rows().token_count()},
         {"us", stepped->us},
         {"attend_us", alone->us},
         {"checked_error", checked->error},
         {"stages", StageJson(*stepped)}});
  return absl::OkStatus();
}

// Sampling takes tokens in a fixed pseudo-random order. These are upper ends of ranges of this
// order, as shares of all tokens. The first range is the resident sample; the others show how many
// rows a larger resident sample would cover.
constexpr double kPlaces[] = {0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 1};

// The expected number of sampled rows in each range of kPlaces, over all KV heads. A stratum h with
// r_h sampled rows of n_h takes them evenly from the first r_h / n_h of the order.
std::vector<double> DrawnByPlace(std::span<const Selection> selections) {
  std::vector<double> drawn(std::size(kPlaces));
  for (const Selection& s : selections) {
    for (size_t i = 0; i < s.indices.size(); ++i) {
      if (s.strata[i] < kStratumTail) continue;
      const double rate = std::exp(-s.log_weights[i]);
      double begin = 0;
      for (size_t p = 0; p < drawn.size(); ++p) {
        const double end = kPlaces[p];
        drawn[p] += std::max(0.0, std::min(rate, end) - begin) / rate;
        begin = end;
      }
    }
  }
  return drawn;
}

// Measures one query of the data. For the errors, every repetition samples with another seed.
// exact: dense attention of this query.
absl::Status MeasureTrace(GpuFixture& fixture, const Options& options, const NamedPolicy& what,
                          const TraceData& data, size_t at, int query,
                          const std::vector<double>& exact) {
  const auto request = [&](int i) {
    AttendRequest r{what.policy, data.Query(at, query), data.visible(at, query)};
    r.policy.seed += 2 * static_cast<uint64_t>(i);
    return r;
  };
  const int heads = fixture.spec().query_head_count;
  const double epsilon = what.policy.epsilon;
  double checked_error = 0;
  std::vector<double> drawn;
  std::vector<double> observed, certified;                          // errors of all outputs
  std::vector<double> observed_sums(heads), certified_sums(heads);  // mean errors per query head
  for (int i = 0; i < options.repetitions; ++i) {
    const auto checked = Check(fixture, what.name, request(i));
    if (!checked.ok()) return checked.status();
    checked_error = std::max(checked_error, checked->error);
    if (i == 0) drawn = DrawnByPlace(checked->selections);
    const AttendResult& work = checked->attended.result;
    const std::vector<double> errors = RelativeErrors(fixture.spec(), work.out, exact);
    for (int h = 0; h < heads; ++h) {
      observed.push_back(errors[h]);
      certified.push_back(work.certificates[h].relative_error);
      observed_sums[h] += errors[h] / options.repetitions;
      certified_sums[h] += certified.back() / options.repetitions;
    }
  }
  // The errors above used several seeds. Timed attends use only the policy's own, with which the
  // resident sample was drawn. Each sees one token less than the one before, so that samples
  // differ.
  const auto timing = Time(fixture, options.repetitions, [&](int i) {
    AttendRequest r = request(0);
    r.visible -= i;
    return r;
  });
  if (!timing.ok()) return timing.status();
  Print({{"name", what.name},
         {"data", "trace"},
         {"bits_per_dim", fixture.spec().hash.bits_per_dim},
         {"tokens", data.lengths()[at]},
         {"query", query},
         {"visible", data.visible(at, query)},
         {"epsilon", epsilon},
         {"us", timing->us},
         {"us_mean", timing->us_mean},
         {"scoring_us", timing->StageUs(IsScoring)},
         {"gather_us", timing->StageUs(IsGather)},
         {"rest_us", timing->StageUs([](const std::string& stage) {
            return !IsScoring(stage) && !IsGather(stage);
          })},
         {"rows", timing->row_count},
         {"row_bytes", timing->row_count * fixture.spec().row_bytes()},
         {"moved_rows", timing->moved_count},
         {"touched_rows", timing->touched},
         {"heavy_tokens", timing->heavy},
         {"sampled_tokens", timing->sampled},
         {"places", kPlaces},
         {"drawn_by_place", drawn},
         {"checked_error", checked_error},
         {"outputs", observed.size()},
         {"observed_error_mean", Mean(observed)},
         {"observed_error_max", *std::max_element(observed.begin(), observed.end())},
         {"beyond_epsilon",
          Share(observed.size(), [&](size_t i) { return !(observed[i] <= epsilon); })},
         {"beyond_certified",
          Share(observed.size(), [&](size_t i) { return !(observed[i] <= certified[i]); })},
         {"certified_beyond_epsilon",
          Share(certified.size(), [&](size_t i) { return !(certified[i] <= epsilon); })},
         {"certified_error_mean", Mean(certified)},
         {"certified_error_max", *std::max_element(certified.begin(), certified.end())},
         {"observed_errors", observed_sums},
         {"certified_errors", certified_sums},
         {"stages", StageJson(*timing)}});
  return absl::OkStatus();
}

std::vector<NamedPolicy> RandomPolicies() {
  Policy share = TopPolicy();
  share.heavy_kind = HeavyKind::kFraction;
  share.heavy_fraction = 0.02;
  Policy hamming = share;
  hamming.selector = Selector::kHamming;
  Policy limited;
  limited.row_count_max = 2500;
  Policy pilot;  // epsilon is so large that the pilot suffices
  pilot.epsilon = 0.999;
  pilot.inflation = 1;
  return {{"asymmetric top 64", TopPolicy()},
          {"asymmetric top 2 %", share},
          {"hamming top 2 %", hamming},
          {"stratified, 2,500 rows", limited},
          {"default policy, peaked", Policy(), 5},
          {"default policy, pilot only", pilot, 5}};
}

absl::Status RunRandom(const Options& options) {
  ModelSpec spec;
  spec.layer_count = 1;
  spec.query_head_count = 32;
  spec.kv_head_count = 8;
  spec.head_dim = 128;
  spec.dtype = DType::kBF16;
  spec.hash.bits_per_dim = options.bits_per_dim;
  Normalize(spec);
  std::vector<int64_t> lengths = options.lengths;
  if (lengths.empty()) lengths = {131072, 524288, 1048576};
  // Includes room for the tokens that the decode steps append.
  auto fixture = GpuFixture::Create(spec, lengths.back() + 4 * options.repetitions);
  if (!fixture.ok()) return fixture.status();
  const RandomData data(spec);
  for (const int64_t n : lengths) {
    RETURN_IF_ERROR(AppendTo(**fixture, data, "random", n));
    for (const NamedPolicy& what : RandomPolicies()) {
      RETURN_IF_ERROR(MeasureRandom(**fixture, data, options, what, n));
    }
    RETURN_IF_ERROR(MeasureStep(**fixture, data, options));
  }
  return absl::OkStatus();
}

// Measures attends as in decoding: each sees all tokens, and consecutive attends have different
// queries of the data. exact: dense attention of each query.
absl::Status MeasureSteps(GpuFixture& fixture, const Options& options, const NamedPolicy& what,
                          const TraceData& data, size_t at,
                          std::span<const std::vector<double>> exact) {
  const int queries = data.queries_per_length();
  const auto request = [&](int i) {
    return AttendRequest{what.policy, data.Query(at, i % queries), data.lengths()[at]};
  };
  std::vector<double> observed;
  for (int i = 0; i < options.repetitions * queries; ++i) {
    AttendRequest step = request(i);
    step.policy.seed += 2 * static_cast<uint64_t>(i / queries);
    const auto attended = fixture.Attend(step, GpuFixture::Mode::kPlain);
    if (!attended.ok()) return attended.status();
    const std::vector<double> errors =
        RelativeErrors(fixture.spec(), attended->result.out, exact[i % queries]);
    observed.insert(observed.end(), errors.begin(), errors.end());
  }
  // Each time that a query is repeated it sees one token less, so that samples differ.
  const auto timing = Time(fixture, options.repetitions * queries, [&](int i) {
    AttendRequest step = request(i);
    step.visible -= i / queries;
    return step;
  });
  if (!timing.ok()) return timing.status();
  Print({{"name", what.name},
         {"data", "steps"},
         {"bits_per_dim", fixture.spec().hash.bits_per_dim},
         {"tokens", data.lengths()[at]},
         {"queries", queries},
         {"epsilon", what.policy.epsilon},
         {"us", timing->us},
         {"us_mean", timing->us_mean},
         {"rows", timing->row_count},
         {"moved_rows", timing->moved_count},
         {"stages", StageJson(*timing)},
         {"outputs", observed.size()},
         {"observed_error_mean", Mean(observed)},
         {"beyond_epsilon", Share(observed.size(), [&](size_t i) {
            return !(observed[i] <= what.policy.epsilon);
          })}});
  return absl::OkStatus();
}

absl::Status RunTrace(const Options& options) {
  const auto data = TraceData::Open(options.data);
  if (!data.ok()) return data.status();
  ModelSpec spec = data->spec();
  spec.hash.bits_per_dim = options.bits_per_dim;
  const std::vector<int64_t>& lengths = data->lengths();
  const auto holds = [](const std::vector<int64_t>& all, int64_t n) {
    return std::find(all.begin(), all.end(), n) != all.end();
  };
  for (const int64_t n : options.lengths) {
    if (holds(lengths, n)) continue;
    return absl::InvalidArgumentError(absl::StrCat("the data has no queries at ", n, " tokens"));
  }
  auto fixture = GpuFixture::Create(spec, lengths.back());
  if (!fixture.ok()) return fixture.status();
  std::vector<NamedPolicy> policies(3, {"default policy", DefaultPolicy(spec)});
  policies[1].name = "default policy, epsilon 0.05";
  policies[1].policy.epsilon = 0.05;
  // With another seed than that of the resident sample, only about 1 % of the sampled rows are
  // resident, by chance.
  policies[2].name = "default policy, sampled outside the resident sample";
  policies[2].policy.seed = 1;
  const NamedPolicy step{"step", DefaultPolicy(spec)};
  const auto wanted = [&](const NamedPolicy& what) { return IsWanted(what, options); };
  Print({{"name", "data"}, {"data", "trace"}, {"meta", data->meta()}});
  for (size_t at = 0; at < lengths.size(); ++at) {
    if (!options.lengths.empty() && !holds(options.lengths, lengths[at])) continue;
    RETURN_IF_ERROR(AppendTo(**fixture, *data, "trace", lengths[at]));
    // Dense attention takes long. Do not compute it if no policy needs it.
    const int query_count = std::ranges::any_of(policies, wanted) ? data->queries_per_length() : 0;
    for (int query = 0; query < query_count; ++query) {
      const std::vector<double> exact = DenseAttention(
          spec, (*fixture)->rows(), data->Query(at, query), data->visible(at, query));
      for (const NamedPolicy& what : policies) {
        if (!wanted(what)) continue;
        absl::Status s = MeasureTrace(**fixture, options, what, *data, at, query, exact);
        if (!s.ok()) return s;
      }
    }
    if (!wanted(step)) continue;
    std::vector<std::vector<double>> exact;
    for (int query = 0; query < data->queries_per_length(); ++query) {
      exact.push_back(
          DenseAttention(spec, (*fixture)->rows(), data->Query(at, query), lengths[at]));
    }
    RETURN_IF_ERROR(MeasureSteps(**fixture, options, step, *data, at, exact));
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  CLI::App app{"Attends of one layer on a GPU over random rows, or over data"};
  Options options;
  app.add_option("--tokens", options.lengths, "lengths, ascending; of data, which of its own");
  app.add_option("--data", options.data, "a folder that bench/trace_data.py wrote");
  app.add_option("--repetitions", options.repetitions, "of each measurement")
      ->check(CLI::PositiveNumber);
  app.add_option("--only", options.only, "measurements whose name holds this");
  app.add_option("--bits-per-dim", options.bits_per_dim, "of the codes")->check(CLI::Range(1, 4));
  CLI11_PARSE(app, argc, argv);
  try {
    const absl::Status status = options.data.empty() ? RunRandom(options) : RunTrace(options);
    if (status.ok()) return 0;
    std::cerr << "attend_bench: " << status << '\n';
  } catch (const std::exception& e) {  // thrown by the JSON library
    std::cerr << "attend_bench: " << e.what() << '\n';
  }
  return 1;
}

}  // namespace
}  // namespace spillway::bench

int main(int argc, char** argv) { return spillway::bench::Main(argc, argv); }

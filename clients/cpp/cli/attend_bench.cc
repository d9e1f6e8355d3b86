#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/cleanup.h"
#include "cli/commands.h"
#include "cli/json.h"
#include "cli/output.h"
#include "cli/random_rows.h"
#include "host/base/status_macros.h"
#include "host/base/steady_time.h"
#include "spillway/error.h"
#include "spillway/tensor.h"

namespace spillway::cli {
namespace {

// If the tool is killed, the daemon deletes its sequence after this time.
constexpr int64_t kSequenceTtlSeconds = 600;
// Bytes of K and V that one append of the filling sends.
constexpr int64_t kFillBytes = int64_t{64} << 20;

// Times and row counts of the measured attends.
struct Measurement {
  std::vector<double> round_trips_us;
  std::vector<double> device_times_us;
  // Sums over attends, queries and groups of query heads, and the number of these.
  double group_count = 0;
  double touched_rows = 0;
  double visible_rows = 0;
  // Certificates by promise (kind of bound), summed over attends, queries and query heads.
  int64_t exact_count = 0;
  int64_t statistical_count = 0;
  int64_t none_count = 0;
};

// Nearest-rank percentile. REQUIRES: values is not empty, share in (0, 1].
double Percentile(std::vector<double> values, double share) {
  const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(values.size())));
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(rank - 1), values.end());
  return values[rank - 1];
}

class Bench {
 public:
  Bench(Client& client, const BenchOptions& options, const CallOptions& call)
      : client_(client),
        options_(options),
        call_(call),
        rows_(options.dtype, 1, options.data_seed),
        // k is standard normal, so scale * q.k has the standard deviation of q.
        queries_(options.dtype, options.logit_stddev, options.data_seed + 1) {}

  // Creates the model and the sequence, which `resources` then owns.
  absl::Status Create(TemporaryResources& resources) {
    v1::Model spec;
    spec.set_layer_count(options_.layer_count);
    spec.set_query_head_count(options_.query_head_count);
    spec.set_kv_head_count(options_.kv_head_count);
    spec.set_head_dim(options_.head_dim);
    spec.set_dtype(options_.dtype);
    spec.mutable_hash_weights()->mutable_rotation()->set_bits_per_dim(options_.bits_per_dim);
    spec.mutable_hash_weights()->mutable_rotation()->set_value_bits(options_.value_bits);
    ASSIGN_OR_RETURN(v1::Model model, client_.CreateModel("", spec, call_));
    resources.OwnModel(model.name());
    v1::Sequence spec_of_sequence;
    spec_of_sequence.set_model(model.name());
    *spec_of_sequence.mutable_policy() = options_.policy;
    spec_of_sequence.mutable_ttl()->set_seconds(kSequenceTtlSeconds);
    ASSIGN_OR_RETURN(sequence_, client_.CreateSequence("", spec_of_sequence, call_));
    resources.OwnSequence(sequence_.name());
    return absl::OkStatus();
  }

  absl::Status Fill() {
    const int64_t token_bytes = int64_t{2} * options_.kv_head_count * options_.head_dim *
                                static_cast<int64_t>(DTypeBytes(options_.dtype));
    const int64_t block = std::max<int64_t>(kFillBytes / token_bytes, 1);
    for (int32_t layer = 0; layer < options_.layer_count; ++layer) {
      for (int64_t start = 0; start < options_.token_count; start += block) {
        const int64_t count = std::min(block, options_.token_count - start);
        RETURN_IF_ERROR(AppendRows(layer, start, count));
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Measurement> Run() {
    Measurement measurement;
    std::unique_ptr<StepStream> stream;
    if (options_.mode == BenchMode::kDecode) stream = client_.OpenSteps({.stop = call_.stop});
    const int32_t total = options_.warmup_count + options_.iteration_count;
    for (int32_t step = 0; step < total; ++step) {
      if (call_.stop.stop_requested()) return absl::CancelledError("interrupted");
      const int32_t layer = step % options_.layer_count;
      double round_trip_us = 0;
      absl::StatusOr<v1::AttendResult> result =
          stream ? Decode(*stream, step, layer, round_trip_us) : Attend(layer, round_trip_us);
      if (!result.ok()) return result.status();
      RETURN_IF_ERROR(ToAbslStatus(result->status()));
      if (step >= options_.warmup_count) Record(*result, round_trip_us, measurement);
    }
    if (stream) {
      RETURN_IF_ERROR(stream->Finish());
    }
    return measurement;
  }

 private:
  absl::Status AppendRows(int32_t layer, int64_t start, int64_t count) {
    const std::string k = rows_.Draw(RowElementCount(count));
    const std::string v = rows_.Draw(RowElementCount(count));
    return client_
        .Append({.sequence = sequence_.name(),
                 .generation = sequence_.generation(),
                 .layer_start = layer,
                 .layer_count = 1,
                 .token_start = start,
                 .token_count = count,
                 .kv_head_count = options_.kv_head_count,
                 .head_dim = options_.head_dim,
                 .dtype = options_.dtype,
                 .k = k,
                 .v = v},
                {.stop = call_.stop})
        .status();
  }

  size_t RowElementCount(int64_t token_count) const {
    return static_cast<size_t>(int64_t{options_.kv_head_count} * token_count * options_.head_dim);
  }

  // Random queries, of a tensor with these dimensions before [T, H_q, d].
  v1::Tensor Queries(std::vector<int64_t> shape = {}) {
    const size_t elements = static_cast<size_t>(options_.query_count) *
                            static_cast<size_t>(options_.query_head_count) *
                            static_cast<size_t>(options_.head_dim);
    shape.insert(shape.end(), {options_.query_count, options_.query_head_count, options_.head_dim});
    return MakeTensor(options_.dtype, shape, queries_.Draw(elements));
  }

  absl::StatusOr<v1::AttendResult> Attend(int32_t layer, double& round_trip_us) {
    v1::AttendRequest request;
    request.set_layer(layer);
    v1::AttendItem& item = *request.add_items();
    item.set_sequence(sequence_.name());
    *item.mutable_q() = Queries();
    const SteadyTime start = SteadyNow();
    absl::StatusOr<v1::AttendResponse> response = client_.Attend(request, call_);
    round_trip_us = absl::ToDoubleMicroseconds(absl::FromChrono(SteadyNow() - start));
    if (!response.ok()) return response.status();
    return std::move(*response->mutable_results(0));
  }

  // Appends query_count tokens at the layer, and attends with as many queries.
  absl::StatusOr<v1::AttendResult> Decode(StepStream& stream, int32_t step, int32_t layer,
                                          double& round_trip_us) {
    v1::StepRequest request;
    if (layer == 0) {
      v1::DecodeStep& begin = *request.mutable_begin();
      begin.set_token_count(options_.query_count);
      v1::DecodeStep::Part& part = *begin.add_parts();
      part.set_sequence(sequence_.name());
      part.set_generation(sequence_.generation());
      part.set_token_start(options_.token_count +
                           int64_t{step / options_.layer_count} * options_.query_count);
    }
    v1::StepAttend& attend = *request.mutable_attend();
    attend.set_layer(layer);
    *attend.mutable_q() = Queries({1});
    for (v1::Tensor* tensor : {attend.mutable_k(), attend.mutable_v()}) {
      *tensor = MakeTensor(options_.dtype,
                           {1, options_.query_count, options_.kv_head_count, options_.head_dim},
                           rows_.Draw(RowElementCount(options_.query_count)));
    }
    const SteadyTime start = SteadyNow();
    const absl::Status status = stream.Attend(request, answer_);
    round_trip_us = absl::ToDoubleMicroseconds(absl::FromChrono(SteadyNow() - start));
    // The stream's own status says more than the UNAVAILABLE of Attend().
    if (absl::IsUnavailable(status)) {
      RETURN_IF_ERROR(stream.Finish());
    }
    if (!status.ok()) return status;
    RETURN_IF_ERROR(ToAbslStatus(answer_.status()));
    if (answer_.results_size() != 1) {
      return absl::InternalError("a layer of one sequence was answered with several results");
    }
    return answer_.results(0);
  }

  void Record(const v1::AttendResult& result, double round_trip_us, Measurement& m) const {
    m.round_trips_us.push_back(round_trip_us);
    m.device_times_us.push_back(result.statistics().device_time_us());
    for (int64_t count : result.statistics().touched_row_counts()) {
      m.touched_rows += static_cast<double>(count);
    }
    const int touched_count = result.statistics().touched_row_counts_size();
    const int group = result.certificate().visible_token_counts_size() / std::max(1, touched_count);
    m.group_count += touched_count;
    for (int64_t count : result.certificate().visible_token_counts()) {
      m.visible_rows += static_cast<double>(count) / static_cast<double>(group);
    }
    for (int promise : result.certificate().promises()) {
      m.exact_count += promise == v1::PROMISE_EXACT;
      m.statistical_count += promise == v1::PROMISE_STATISTICAL;
      m.none_count += promise == v1::PROMISE_NONE;
    }
  }

  Client& client_;
  const BenchOptions& options_;
  const CallOptions& call_;
  RandomRows rows_;
  v1::StepResponse answer_;
  RandomRows queries_;
  v1::Sequence sequence_;
};

std::vector<double> BeyondDevice(const Measurement& m) {
  std::vector<double> beyond(m.round_trips_us.size());
  std::transform(m.round_trips_us.begin(), m.round_trips_us.end(), m.device_times_us.begin(),
                 beyond.begin(), std::minus<>());
  return beyond;
}

Json TimesJson(const std::vector<double>& values) {
  return {{"median", Percentile(values, 0.5)}, {"p99", Percentile(values, 0.99)}};
}

Json BenchJson(const BenchOptions& options, const Measurement& m) {
  return {
      {"mode", options.mode == BenchMode::kDecode ? "decode" : "attend"},
      {"layer_count", options.layer_count},
      {"query_head_count", options.query_head_count},
      {"kv_head_count", options.kv_head_count},
      {"head_dim", options.head_dim},
      {"dtype", DTypeName(options.dtype)},
      {"bits_per_dim", options.bits_per_dim},
      {"value_bits", options.value_bits},
      {"token_count", options.token_count},
      {"query_count", options.query_count},
      {"logit_stddev", options.logit_stddev},
      {"data_seed", options.data_seed},
      {"policy_overrides", options.policy_overrides},
      {"iteration_count", options.iteration_count},
      {"round_trip_us", TimesJson(m.round_trips_us)},
      {"device_time_us", TimesJson(m.device_times_us)},
      {"beyond_device_us", TimesJson(BeyondDevice(m))},
      {"touched_rows_per_kv_head", m.touched_rows / m.group_count},
      {"touched_row_fraction", m.touched_rows / m.visible_rows},
      {"promises",
       {{"exact", m.exact_count}, {"statistical", m.statistical_count}, {"none", m.none_count}}}};
}

void PrintBench(const BenchOptions& options, const Measurement& m, std::ostream& out) {
  out << (options.mode == BenchMode::kDecode ? "decode" : "attend") << " over "
      << FormatCount(options.token_count) << " random tokens, " << options.query_head_count << '/'
      << options.kv_head_count << " heads of " << options.head_dim << ", "
      << DTypeName(options.dtype) << ", " << options.iteration_count << " times\n";
  Table table({"MICROSECONDS", "MEDIAN", "P99"});
  const auto add = [&table](const char* name, const std::vector<double>& values) {
    table.AddRow({name, absl::StrFormat("%.1f", Percentile(values, 0.5)),
                  absl::StrFormat("%.1f", Percentile(values, 0.99))});
  };
  add("round trip", m.round_trips_us);
  add("device", m.device_times_us);
  add("beyond device", BeyondDevice(m));
  table.Print(out);
  out << "rows touched " << absl::StrFormat("%.0f", m.touched_rows / m.group_count)
      << " per KV head and query, " << FormatShare(m.touched_rows, m.visible_rows)
      << " of the visible ones\n"
      << "promises     exact " << FormatCount(m.exact_count) << ", statistical "
      << FormatCount(m.statistical_count) << ", none " << FormatCount(m.none_count) << '\n';
}

}  // namespace

absl::Status AttendBench(Client& client, const BenchOptions& options, const CallOptions& call,
                         const Output& output) {
  if (options.query_head_count % options.kv_head_count != 0) {
    return absl::InvalidArgumentError(absl::StrCat("--query-heads ", options.query_head_count,
                                                   " is not a multiple of --kv-heads ",
                                                   options.kv_head_count));
  }
  TemporaryResources resources(client);
  Bench bench(client, options, call);
  RETURN_IF_ERROR(bench.Create(resources));
  RETURN_IF_ERROR(bench.Fill());
  ASSIGN_OR_RETURN(Measurement measurement, bench.Run());
  RETURN_IF_ERROR(resources.Delete());
  if (output.json) {
    output.out << BenchJson(options, measurement).dump(2) << '\n';
  } else {
    PrintBench(options, measurement, output.out);
  }
  return absl::OkStatus();
}

}  // namespace spillway::cli

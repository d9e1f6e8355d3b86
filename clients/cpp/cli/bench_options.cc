#include "cli/bench_options.h"

#include <map>
#include <string>

#include "absl/strings/ascii.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/generated_enum_reflection.h"

namespace spillway::cli {
namespace {

using Range = CLI::Range;

// An option that sets a field of the policy only when it is given; the daemon
// checks the value.
template <typename T, typename Set>
CLI::Option* AddPolicyOption(CLI::App& command, const std::string& name, Set set,
                             const std::string& description) {
  return command.add_option_function<T>(name, set, description)->group("Policy");
}

// Makes an option take the names of a map, and shows them as its type.
template <typename Enum>
void SetChoices(CLI::Option* option, const std::map<std::string, Enum>& names) {
  option->transform(CLI::CheckedTransformer(names, CLI::ignore_case).description(""));
  std::string type;
  for (const auto& [name, value] : names) type += (type.empty() ? "" : "|") + name;
  option->type_name(type);
}

// The API's values but the first, which is none: "double_sparsity" of
// SELECTOR_DOUBLE_SPARSITY.
template <typename Enum>
std::map<std::string, Enum> ValuesByName() {
  const google::protobuf::EnumDescriptor& all = *google::protobuf::GetEnumDescriptor<Enum>();
  std::map<std::string, Enum> values;
  for (int i = 1; i < all.value_count(); ++i) {
    const std::string& name = all.value(i)->name();
    values[absl::AsciiStrToLower(name.substr(name.find('_') + 1))] =
        static_cast<Enum>(all.value(i)->number());
  }
  return values;
}

template <typename Enum, typename Set>
void AddPolicyEnum(CLI::App& command, const std::string& name, Set set,
                   const std::string& description) {
  SetChoices(AddPolicyOption<Enum>(command, name, set, description), ValuesByName<Enum>());
}

void AddShapeOptions(CLI::App& command, BenchOptions& options) {
  const auto add = [&](const char* name, auto& value, const char* description) {
    return command.add_option(name, value, description)->capture_default_str()->group("Shape");
  };
  add("--layers", options.layer_count, "layers, attended in turn")->check(Range(1, 1024));
  add("--query-heads", options.query_head_count, "query heads")->check(Range(1, 1024));
  add("--kv-heads", options.kv_head_count, "KV heads")->check(Range(1, 1024));
  add("--head-dim", options.head_dim, "elements of a key")->check(Range(16, 256));
  SetChoices<v1::DType>(
      command.add_option("--dtype", options.dtype, "element type of K, V and q; default bf16")
          ->group("Shape"),
      {{"f32", v1::DTYPE_F32}, {"f16", v1::DTYPE_F16}, {"bf16", v1::DTYPE_BF16}});
  add("--bits-per-dim", options.bits_per_dim, "code bits per dimension")->check(Range(1, 4));
  add("--tokens", options.token_count, "tokens of the sequence")
      ->check(Range(int64_t{1}, int64_t{1} << 40));
  add("--queries", options.query_count, "query tokens of each attend")->check(Range(1, 1024));
}

}  // namespace

void AddBenchOptions(CLI::App& command, BenchOptions& options) {
  command.footer(
      "K and V are random, so the budget of a verified tail says nothing of a real model:\n"
      "attention over them is flat unless --logit-stddev is large. Fix the budget with\n"
      "--row-count-max, or read the rows touched as a property of this data alone.");
  SetChoices<BenchMode>(
      command.add_option("--mode", options.mode,
                         "unary calls, or append and attend on a stream; default attend"),
      {{"attend", BenchMode::kAttend}, {"decode", BenchMode::kDecode}});
  const auto add = [&](const char* name, auto& value, const char* description) {
    return command.add_option(name, value, description)->capture_default_str();
  };
  add("--iterations", options.iteration_count, "measured attends")->check(Range(1, 1000000));
  add("--warmup", options.warmup_count, "attends before them")->check(Range(0, 1000000));
  add("--logit-stddev", options.logit_stddev, "standard deviation of the logits")
      ->check(Range(0.0, 1000.0));
  add("--data-seed", options.data_seed, "seed of K, V and q");
  AddShapeOptions(command, options);

  v1::Policy& policy = options.policy;
  AddPolicyEnum<v1::Selector>(
      command, "--selector", [&policy](v1::Selector value) { policy.set_selector(value); },
      "what scores the keys");
  AddPolicyEnum<v1::Tail>(
      command, "--tail", [&policy](v1::Tail value) { policy.set_tail(value); },
      "what stands in for the others");
  AddPolicyEnum<v1::Bound>(
      command, "--bound", [&policy](v1::Bound value) { policy.set_bound(value); },
      "size of a uniform tail");
  CLI::Option* count = AddPolicyOption<int64_t>(
      command, "--heavy-count",
      [&policy](int64_t value) { policy.mutable_top_k()->set_count(value); }, "heavy tokens");
  CLI::Option* fraction = AddPolicyOption<double>(
      command, "--heavy-fraction",
      [&policy](double value) { policy.mutable_top_k()->set_fraction(value); },
      "heavy tokens as a share of the visible ones");
  CLI::Option* mass = AddPolicyOption<double>(
      command, "--top-p", [&policy](double value) { policy.mutable_top_p()->set_mass(value); },
      "heavy tokens by estimated mass");
  count->excludes(fraction)->excludes(mass);
  fraction->excludes(mass);
  AddPolicyOption<int64_t>(
      command, "--sink", [&policy](int64_t value) { policy.set_sink_token_count(value); },
      "first tokens, always attended");
  AddPolicyOption<int64_t>(
      command, "--window", [&policy](int64_t value) { policy.set_window_token_count(value); },
      "most recent tokens, always attended");
  AddPolicyOption<double>(
      command, "--epsilon", [&policy](double value) { policy.set_epsilon(value); },
      "relative error to promise");
  AddPolicyOption<double>(
      command, "--delta", [&policy](double value) { policy.set_delta(value); },
      "chance that the promise fails");
  AddPolicyOption<int32_t>(
      command, "--pilot", [&policy](int32_t value) { policy.set_pilot_token_count(value); },
      "pilot rows per stratum");
  AddPolicyOption<int64_t>(
      command, "--row-count-max", [&policy](int64_t value) { policy.set_row_count_max(value); },
      "most rows a KV head may touch");
  AddPolicyOption<uint64_t>(
      command, "--seed", [&policy](uint64_t value) { policy.set_seed(value); },
      "seed of the sampling");
}

}  // namespace spillway::cli

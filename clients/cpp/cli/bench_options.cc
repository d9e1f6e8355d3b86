#include "cli/bench_options.h"

#include <map>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace spillway::cli {
namespace {

using Range = CLI::Range;

// Adds an option that sets a field of the policy only if it is given. The daemon checks the value.
// text: converts a value to text.
template <typename T, typename Set, typename Text>
CLI::Option* AddPolicyOption(CLI::App& command, BenchOptions& options, const std::string& name,
                             Set set, Text text, const std::string& description) {
  const auto take = [&options, name, set, text](const T& value) {
    set(value);
    options.policy_overrides[name.substr(2)] = text(value);
  };
  return command.add_option_function<T>(name, take, description)->group("Policy");
}
template <typename T, typename Set>
CLI::Option* AddPolicyOption(CLI::App& command, BenchOptions& options, const std::string& name,
                             Set set, const std::string& description) {
  const auto text = [](const T& value) { return absl::StrCat(value); };
  return AddPolicyOption<T>(command, options, name, set, text, description);
}

// Makes an option accept the names of a map, and shows them in the help as its type.
template <typename Enum>
void SetChoices(CLI::Option* option, const std::map<std::string, Enum>& names) {
  option->transform(CLI::CheckedTransformer(names, CLI::ignore_case).description(""));
  std::string type;
  for (const auto& [name, value] : names) type += (type.empty() ? "" : "|") + name;
  option->type_name(type);
}

// SELECTOR_DOUBLE_SPARSITY -> "double_sparsity".
std::string ShortName(const std::string& name) {
  return absl::AsciiStrToLower(name.substr(name.find('_') + 1));
}

// Adds an option that accepts all values of an API enum except the first, which is _UNSPECIFIED.
template <typename Enum, typename Set>
void AddPolicyEnum(CLI::App& command, BenchOptions& options, const std::string& name, Enum last,
                   const std::string& (*name_of)(Enum), Set set, const std::string& description) {
  std::map<std::string, Enum> values;
  for (int i = 1; i <= last; ++i) {
    const auto value = static_cast<Enum>(i);
    values[ShortName(name_of(value))] = value;
  }
  const auto text = [name_of](Enum value) { return ShortName(name_of(value)); };
  SetChoices(AddPolicyOption<Enum>(command, options, name, set, text, description), values);
}

void AddShapeOptions(CLI::App& command, BenchOptions& options) {
  const auto add = [&](const char* name, auto& value, const char* description) {
    return command.add_option(name, value, description)->capture_default_str()->group("Shape");
  };
  add("--layers", options.layer_count, "layers, attended one after the other")
      ->check(Range(1, 1024));
  add("--query-heads", options.query_head_count, "query heads of a layer")->check(Range(1, 1024));
  add("--kv-heads", options.kv_head_count, "KV heads of a layer")->check(Range(1, 1024));
  add("--head-dim", options.head_dim, "elements of a key")->check(Range(16, 256));
  SetChoices<v1::DType>(
      command.add_option("--dtype", options.dtype, "element type of K, V and q; default bf16")
          ->group("Shape"),
      {{"f32", v1::DTYPE_F32}, {"f16", v1::DTYPE_F16}, {"bf16", v1::DTYPE_BF16}});
  add("--bits-per-dim", options.bits_per_dim, "bits of the codes per dimension of a key")
      ->check(Range(1, 4));
  add("--value-bits", options.value_bits, "bits of the codes per dimension of a value; 0: none")
      ->check(Range(0, 3));
  add("--tokens", options.token_count, "tokens of the sequence")
      ->check(Range(int64_t{1}, int64_t{1} << 40));
  add("--queries", options.query_count, "query tokens of each attend")->check(Range(1, 1024));
}

}  // namespace

void AddBenchOptions(CLI::App& command, BenchOptions& options) {
  command.footer(
      "K and V are random. Unless --logit-stddev is large, attention over them is almost uniform,\n"
      "so the number of rows read says nothing about a real model. To time a fixed number of\n"
      "rows, set --row-count-max.");
  SetChoices<BenchMode>(command.add_option("--mode", options.mode,
                                           "attend: unary Attend calls; decode: append and attend "
                                           "in decode steps; default attend"),
                        {{"attend", BenchMode::kAttend}, {"decode", BenchMode::kDecode}});
  const auto add = [&](const char* name, auto& value, const char* description) {
    return command.add_option(name, value, description)->capture_default_str();
  };
  add("--iterations", options.iteration_count, "attends to measure")->check(Range(1, 1000000));
  add("--warmup", options.warmup_count, "attends before the measurement")->check(Range(0, 1000000));
  add("--logit-stddev", options.logit_stddev, "standard deviation of the logits")
      ->check(Range(0.0, 1000.0));
  add("--data-seed", options.data_seed, "seed of K, V and q");
  AddShapeOptions(command, options);

  v1::Policy& policy = options.policy;
  AddPolicyEnum<v1::Selector>(
      command, options, "--selector", v1::Selector_MAX, v1::Selector_Name,
      [&policy](v1::Selector value) { policy.set_selector(value); },
      "selector, which ranks the tokens");
  AddPolicyEnum<v1::Tail>(
      command, options, "--tail", v1::Tail_MAX, v1::Tail_Name,
      [&policy](v1::Tail value) { policy.set_tail(value); },
      "how the tokens that are not heavy are sampled");
  AddPolicyEnum<v1::Bound>(
      command, options, "--bound", v1::Bound_MAX, v1::Bound_Name,
      [&policy](v1::Bound value) { policy.set_bound(value); },
      "how the size of a uniform sample is computed");
  CLI::Option* count = AddPolicyOption<int64_t>(
      command, options, "--heavy-count",
      [&policy](int64_t value) { policy.mutable_top_k()->set_count(value); },
      "heavy tokens per KV head");
  CLI::Option* fraction = AddPolicyOption<double>(
      command, options, "--heavy-fraction",
      [&policy](double value) { policy.mutable_top_k()->set_fraction(value); },
      "heavy tokens as a share of the visible ones");
  CLI::Option* mass = AddPolicyOption<double>(
      command, options, "--top-p",
      [&policy](double value) { policy.mutable_top_p()->set_mass(value); },
      "heavy tokens by this share of the estimated softmax mass");
  count->excludes(fraction)->excludes(mass);
  fraction->excludes(mass);
  AddPolicyOption<int64_t>(
      command, options, "--sink", [&policy](int64_t value) { policy.set_sink_token_count(value); },
      "first tokens, always attended");
  AddPolicyOption<int64_t>(
      command, options, "--window",
      [&policy](int64_t value) { policy.set_window_token_count(value); },
      "most recent tokens, always attended");
  AddPolicyOption<double>(
      command, options, "--epsilon", [&policy](double value) { policy.set_epsilon(value); },
      "relative error of the error bound");
  AddPolicyOption<double>(
      command, options, "--delta", [&policy](double value) { policy.set_delta(value); },
      "probability that the error exceeds epsilon");
  AddPolicyOption<int32_t>(
      command, options, "--pilot",
      [&policy](int32_t value) { policy.set_pilot_token_count(value); }, "pilot rows per stratum");
  AddPolicyOption<int64_t>(
      command, options, "--row-count-max",
      [&policy](int64_t value) { policy.set_row_count_max(value); },
      "most rows that a KV head may read in one attend");
  AddPolicyOption<uint64_t>(
      command, options, "--seed", [&policy](uint64_t value) { policy.set_seed(value); },
      "seed of the sampling");
}

}  // namespace spillway::cli

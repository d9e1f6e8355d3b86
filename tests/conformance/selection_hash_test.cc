// Hashes of what attends select and promise, over a fixed matrix of shapes, policies and seeds. A
// change that should keep the behaviour must keep the hashes. A change of behaviour also changes
// selection_hashes.inc, where a review sees which cases moved. SPILLWAY_SELECTION_HASHES=FILE
// writes the new text of the table to FILE. SPILLWAY_OUTPUT_HASHES=FILE writes hashes of the bits
// of outputs and certificates, to compare two builds on one machine.
//
// Budgets rest on sums whose last bits depend on the device. So no budget of a case may change when
// the squared norms that it follows from change by 1e-5 of themselves.
#include <gtest/gtest.h>

#include <bit>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iomanip>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "host/policy/methods.h"
#include "tests/conformance/method_models.h"

namespace spillway {
namespace {

using reference::Context;

struct Hashes {
  uint64_t rows;      // tokens and strata of every (query, KV head)
  uint64_t promises;  // promises of every (query, query head)
};

struct NamedHashes {
  const char* name;
  Hashes hashes;
};
constexpr NamedHashes kExpected[] = {
#include "tests/conformance/selection_hashes.inc"
};

// FNV-1a with 64 bits.
class Hasher {
 public:
  template <typename T>
  void Add(const T& value) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(&value);
    for (size_t i = 0; i < sizeof(T); ++i) hash_ = (hash_ ^ bytes[i]) * 0x100000001B3u;
  }
  template <typename T>
  void AddAll(const std::vector<T>& values) {
    Add(static_cast<uint64_t>(values.size()));
    for (const T& value : values) Add(value);
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xCBF29CE484222325u;
};

struct Case {
  std::string name;
  Policy policy;
  std::vector<TailPolicy> tails = {};
  bool audited = false;
  float even_heads = 1;  // factor on the queries of query heads 0, 2, ...
};

void Count(Policy& policy, int64_t heavy_count) {
  policy.heavy_kind = HeavyKind::kCount;
  policy.heavy_count = heavy_count;
}

// The cases of a model. `add` changes the model's default policy.
std::vector<Case> Cases(const ModelSpec& spec, const std::vector<Selector>& selectors) {
  std::vector<Case> cases;
  const auto add = [&](const std::string& name, Selector selector,
                       const std::function<void(Policy&)>& change) -> Case& {
    Policy policy = DefaultPolicy(spec);
    policy.selector = selector;
    change(policy);
    EXPECT_TRUE(Validate(policy, spec).empty()) << name;
    return cases.emplace_back(Case{name, policy, {}, false});
  };
  // Without the oracle: the rounding of its logits depends on the device's vector width, so a token
  // at a bin's edge may fall on either side.
  static const std::map<Selector, std::string> kNames = {{Selector::kAsymmetric, "asymmetric"},
                                                         {Selector::kHamming, "hamming"},
                                                         {Selector::kInt4Keys, "int4 keys"},
                                                         {Selector::kQuest, "quest"},
                                                         {Selector::kDoubleSparsity, "labels"}};
  for (const Selector selector : selectors) {
    const std::string of = kNames.at(selector) + " ";
    add(of + "default", selector, [](Policy&) {});
    add(of + "top 32", selector, [](Policy& p) { Count(p, 32), p.tail = Tail::kNone; });
    add(of + "top 256", selector, [](Policy& p) { Count(p, 256); });
    add(of + "no heavy set", selector, [](Policy& p) { Count(p, 0); });
    add(of + "fraction", selector, [](Policy& p) {
      p.heavy_kind = HeavyKind::kFraction;
      p.heavy_fraction = 0.03;
      p.epsilon = 0.3;
    });
    add(of + "rows bound", selector, [](Policy& p) { p.row_count_max = 700; });
    if (selector == Selector::kHamming) continue;
    add(of + "mass", selector, [](Policy& p) { p.heavy_kind = HeavyKind::kMass; });
  }
  const Selector first = selectors.front();
  add("epsilon 0.05, seed 7", first, [](Policy& p) { p.epsilon = 0.05, p.seed = 7; });
  add("epsilon 0.5", first, [](Policy& p) { p.epsilon = 0.5, p.pilot_token_count = 16; });
  add("inflation 3, pilot 200", first, [](Policy& p) {
    p.inflation = 3;
    p.pilot_token_count = 200;
    p.epsilon = 0.3;
  });
  add("edges", first, [](Policy& p) { p.sink_token_count = 0, p.window_token_count = 1; });
  add("wide edges", first, [](Policy& p) {
    p.sink_token_count = 300;
    p.window_token_count = 500;
  });
  if (first != Selector::kHamming) {
    add("narrow mass", first, [](Policy& p) {
      p.heavy_kind = HeavyKind::kMass;
      p.heavy_mass = 0.2;
      p.heavy_floor = 100;
      p.heavy_ceiling = 150;
    });
  }
  add("audited", first, [](Policy&) {}).audited = true;
  for (const Bound bound : {Bound::kDenominator, Bound::kPaper, Bound::kRatio}) {
    add("uniform " + std::to_string(static_cast<int>(bound)), first, [&](Policy& p) {
      p.tail = Tail::kUniform;
      p.bound = bound;
      p.epsilon = 0.2;
    });
  }
  add("a third draw", first, [](Policy& p) {
    p.epsilon = 0.02, p.delta = 0.05, p.inflation = 1;
    Count(p, 64);
  });
  // Heads with sharp attention, whose peaks no sample of the pages finds.
  add("sharp heads", first, [](Policy&) {}).even_heads = 12;
  if (first != Selector::kHamming) {
    add("sharp heads, mass", first, [](Policy& p) { p.heavy_kind = HeavyKind::kMass; }).even_heads =
        12;
  }
  // Rows that row_count_max leaves for the tail: none, too few for strata, or enough for a pilot
  // but not for the budget.
  const int64_t least = 64 + 127 + (first == Selector::kAsymmetric ? 64 : 256) + 16;
  for (const int64_t more : {0, 10, 40, 100, 500, 1600}) {
    add("at most " + std::to_string(more) + " rows beyond the least", first, [&](Policy& p) {
      p.row_count_max = least + more;
      p.epsilon = 0.02;
    });
  }
  add("at most 620 rows of a pilot of 300", first, [&](Policy& p) {
    p.row_count_max = 620;
    p.pilot_token_count = 300;
  });
  add("at most 500 rows by fraction", first, [&](Policy& p) {
    p.heavy_kind = HeavyKind::kFraction;
    p.heavy_fraction = 0.2;
    p.row_count_max = 500;
  });
  Case& mixed = add("a policy a head", first, [](Policy&) {});
  for (int h = 0; h < spec.kv_head_count; ++h) {
    TailPolicy& own = mixed.tails.emplace_back(mixed.policy);
    if (h % 2 == 0) {
      own.tail = Tail::kUniform;
      own.bound = Bound::kPaper;
    } else {
      own.inflation = 3;
      own.pilot_token_count = 96;
    }
  }
  return cases;
}

void AddStages(const ModelSpec& spec, std::vector<Case>& cases) {
  for (const auto& [name, first, second] :
       {std::tuple("hamming, then asymmetric", Selector::kHamming, Selector::kAsymmetric),
        std::tuple("quest, then int4 keys", Selector::kQuest, Selector::kInt4Keys),
        std::tuple("asymmetric, then int4 keys", Selector::kAsymmetric, Selector::kInt4Keys)}) {
    for (const Tail tail : {Tail::kStratified, Tail::kUniform}) {
      Policy policy = DefaultPolicy(spec);
      policy.candidate_selector = first;
      policy.selector = second;
      policy.tail = tail;
      policy.bound = Bound::kPaper;
      policy.candidate_count = 510;
      cases.push_back({std::string(name) + (tail == Tail::kUniform ? ", uniform" : ""), policy});
      policy.candidate_count = 0;
      policy.heavy_kind = HeavyKind::kMass;
      cases.push_back({cases.back().name + ", mass", policy});
    }
  }
  Policy lsh = DefaultPolicy(spec);
  lsh.tail = Tail::kLshSampling;
  cases.push_back({"LSH sampling", lsh});
}

class SelectionHash : public ::testing::TestWithParam<DeviceFactory> {
 protected:
  // Compares every case of a model with the table.
  void Expect(const std::string& model_name, const ModelSpec& spec, const std::vector<Case>& cases,
              int64_t n, std::span<const std::byte> safetensors = {}) {
    DeviceBench bench(GetParam(), spec, 0, safetensors);
    const Context context = reference::TraceContext(spec, n, 5 + n);
    const std::vector<float> q = reference::TraceQueries(context, 2, 11, 1.5);
    BenchSequence sequence(bench);
    ASSERT_TRUE(sequence.Append(context, 0, n, 2500).ok());
    for (const Case& c : cases) {
      const std::string name = model_name + ": " + c.name;
      std::vector<float> queries = q;
      for (size_t i = 0; i < queries.size(); ++i) {
        const size_t head = i / spec.head_dim % spec.query_head_count;
        if (head % 2 == 0) queries[i] *= c.even_heads;
      }
      const auto run = [&](bool select_only) {
        JobItem item = sequence.AttendItem(c.policy, queries, select_only, {n - 301, n});
        item.attend->tails = c.tails;
        item.attend->audited = c.audited;
        return sequence.RunOne(std::move(item));
      };
      const JobItem attended = run(false);
      ASSERT_TRUE(attended.status.ok()) << name << ": " << attended.status;
      Hasher rows, promises;
      std::vector<Selection> selections;
      if (c.policy.tail == Tail::kLshSampling) {
        // Each query head has its own rows, which a selection cannot express.
        rows.AddAll(attended.result.touched_row_counts);
      } else {
        JobItem selected = run(true);
        ASSERT_TRUE(selected.status.ok()) << name << ": " << selected.status;
        selections = std::move(selected.result.selections);
      }
      for (const Selection& s : selections) {
        rows.AddAll(s.indices);
        rows.AddAll(s.strata);
      }
      for (const Certificate& certificate : attended.result.certificates) {
        promises.Add(certificate.promise);
      }
      Compare(name, {rows.value(), promises.value()});
      WriteOutputs(name, selections, attended.result);
    }
  }

 private:
  void Compare(const std::string& name, const Hashes& got) {
    static const std::map<std::string, Hashes> expected = [] {
      std::map<std::string, Hashes> table;
      for (const NamedHashes& entry : kExpected) table[entry.name] = entry.hashes;
      return table;
    }();
    if (const char* file = std::getenv("SPILLWAY_SELECTION_HASHES"); file != nullptr) {
      std::ofstream(file, std::ios::app) << std::hex << "{\"" << name << "\", {0x" << got.rows
                                         << ", 0x" << got.promises << "}},\n";
      return;
    }
    const auto found = expected.find(name);
    ASSERT_NE(found, expected.end()) << name << " is not in selection_hashes.inc";
    EXPECT_EQ(got.rows, found->second.rows) << name << ": other rows are selected";
    EXPECT_EQ(got.promises, found->second.promises) << name << ": other promises are made";
  }

  static void WriteOutputs(const std::string& name, const std::vector<Selection>& selections,
                           const AttendResult& result) {
    const char* file = std::getenv("SPILLWAY_OUTPUT_HASHES");
    if (file == nullptr) return;
    Hasher bits;
    for (const Selection& s : selections) bits.AddAll(s.log_weights);
    bits.AddAll(result.out);
    bits.AddAll(result.lse);
    bits.AddAll(result.touched_row_counts);
    for (const Certificate& c : result.certificates) {
      bits.Add(c.visible_token_count);
      bits.Add(c.heavy_token_count);
      bits.Add(c.sampled_token_count);
      bits.Add(c.relative_error);
      bits.Add(c.tail_mass);
      bits.Add(c.promise);
    }
    std::ofstream(file, std::ios::app) << std::hex << bits.value() << " " << name << "\n";
  }
};

TEST_P(SelectionHash, OfTheDefaultWay) {
  struct Shape {
    const char* name;
    int kv_heads, group, head_dim, bits;
    DType dtype;
    int64_t n;
  };
  for (const Shape& s : {Shape{"d 128 bf16", 2, 4, 128, 3, DType::kBF16, 20011},
                         Shape{"d 64 f32", 1, 1, 64, 2, DType::kF32, 5003},
                         Shape{"d 80 f16", 2, 3, 80, 4, DType::kF16, 7001},
                         Shape{"d 256 bf16", 1, 16, 256, 1, DType::kBF16, 5003}}) {
    const ModelSpec spec =
        MakeSpec(s.kv_heads, s.group, s.head_dim, s.dtype, {.bits_per_dim = s.bits, .seed = 3});
    Expect(s.name, spec, Cases(spec, {Selector::kAsymmetric}), s.n);
  }
}

TEST_P(SelectionHash, WithValueCodes) {
  for (const int value_bits : {1, 2, 3}) {
    const ModelSpec spec =
        MakeSpec(2, 4, 128, DType::kBF16, {.bits_per_dim = 3, .seed = 3, .value_bits = value_bits});
    Expect(std::to_string(value_bits) + "-bit values", spec, Cases(spec, {Selector::kAsymmetric}),
           9001);
  }
}

TEST_P(SelectionHash, OfOtherMethods) {
  if (!HasFirstSelection()) GTEST_SKIP() << "not in this build";
  const IndexedModel model(2, 2, 64, DType::kBF16, EveryIndex(16), {.bits_per_dim = 3, .seed = 5});
  std::vector<Case> cases = Cases(model.spec, {Selector::kHamming, Selector::kInt4Keys,
                                               Selector::kQuest, Selector::kDoubleSparsity});
  AddStages(model.spec, cases);
  Expect("indices", model.spec, cases, 6007, model.file);
}

INSTANTIATE_TEST_SUITE_P(Devices, SelectionHash, ::testing::ValuesIn(DeviceFactories()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spillway

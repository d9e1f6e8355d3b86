// What a model may ask of optional methods.
#include "host/model/model_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace spillway {
namespace {

using ::testing::IsEmpty;

ModelSpec LlamaSpec() {
  ModelSpec spec;
  spec.layer_count = 32;
  spec.query_head_count = 32;
  spec.kv_head_count = 8;
  spec.head_dim = 128;
  return spec;
}

void Mlp(ModelSpec& s) { s.hash.kind = HashKind::kMlp; }
void Lsh(ModelSpec& s, int tables, int bits) {
  s.indices.lsh_table_count = tables;
  s.indices.lsh_bits = bits;
}

TEST(MethodsModelSpec, FillsInTheHiddenLayersWidth) {
  ModelSpec spec = LlamaSpec();
  spec.hash.kind = HashKind::kMlp;
  spec.hash.residual = true;
  EXPECT_THAT(Normalize(spec), IsEmpty());
  EXPECT_EQ(spec.hash.hidden_dim, 128);
}

TEST(MethodsModelSpec, TheEdgesOfTheIndicesRangesAreInside) {
  for (const int page : {0, 16, 32, 64, 128}) {
    for (const int channels : {0, 8, 128}) {
      for (const auto& [tables, bits] : {std::pair(0, 0), std::pair(1, 1), std::pair(512, 16)}) {
        for (const HashKind kind : {HashKind::kNone, HashKind::kRotation, HashKind::kMlp}) {
          ModelSpec spec = LlamaSpec();
          spec.hash.kind = kind;
          spec.indices = {true, page, channels, tables, bits, 7};
          EXPECT_THAT(Normalize(spec), IsEmpty());
        }
      }
    }
  }
}

TEST(MethodsModelSpec, AnMlpMayHaveTwoHiddenLayersAndQueriesTheirOwn) {
  ModelSpec spec = LlamaSpec();
  Mlp(spec);
  spec.hash.hash_bits = 32;
  spec.hash.hidden_layer_count = 2;
  spec.hash.per_query_head = spec.hash.query_weights = spec.hash.raw_keys = true;
  EXPECT_THAT(Normalize(spec), IsEmpty());
  EXPECT_EQ(spec.plane_bits(), 128);
}

TEST(MethodsModelSpec, SaysTheValueAndTheLimit) {
  const auto description = [](void (*change)(ModelSpec&)) {
    ModelSpec spec = LlamaSpec();
    change(spec);
    const std::vector<FieldError> errors = Normalize(spec);
    EXPECT_EQ(errors.size(), 1u);
    return errors.empty() ? "" : errors[0].description;
  };
  EXPECT_EQ(description([](ModelSpec& s) { s.indices.quest_page_token_count = 48; }),
            "value 48 is not 0, 16, 32, 64 or 128");
  EXPECT_EQ(description([](ModelSpec& s) { s.indices.label_channel_count = 136; }),
            "value 136 is not a multiple of 8 in [8, 128]");
  EXPECT_EQ(description([](ModelSpec& s) { Lsh(s, 513, 8); }), "value 513 is not in [1, 512]");
  EXPECT_EQ(description([](ModelSpec& s) { Lsh(s, 75, 17); }), "value 17 is not in [1, 16]");
  EXPECT_EQ(description([](ModelSpec& s) { Mlp(s), s.hash.hidden_layer_count = 3; }),
            "value 3 is not in [1, 2]");
}

}  // namespace
}  // namespace spillway

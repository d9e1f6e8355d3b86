#include "host/model/model_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>

namespace spillway {
namespace {

using ::testing::Contains;
using ::testing::Field;
using ::testing::IsEmpty;

ModelSpec LlamaSpec() {
  ModelSpec spec;
  spec.layer_count = 32;
  spec.query_head_count = 32;
  spec.kv_head_count = 8;
  spec.head_dim = 128;
  return spec;
}

// One change to a valid spec, and the field that the error must name.
struct BadCase {
  const char* field;
  void (*change)(ModelSpec&);
};

class BadSpec : public ::testing::TestWithParam<BadCase> {};

TEST_P(BadSpec, NamesTheField) {
  ModelSpec spec = LlamaSpec();
  GetParam().change(spec);
  EXPECT_THAT(Normalize(spec), Contains(Field(&FieldError::field, GetParam().field)));
}

void Mlp(ModelSpec& s) { s.hash.kind = HashKind::kMlp; }
void Lsh(ModelSpec& s, int tables, int bits) {
  s.indices.lsh_table_count = tables;
  s.indices.lsh_bits = bits;
}

INSTANTIATE_TEST_SUITE_P(
    ModelSpec, BadSpec,
    ::testing::Values(
        BadCase{"layer_count", [](ModelSpec& s) { s.layer_count = 0; }},
        BadCase{"layer_count", [](ModelSpec& s) { s.layer_count = 1025; }},
        BadCase{"query_head_count", [](ModelSpec& s) { s.query_head_count = 0; }},
        BadCase{"query_head_count", [](ModelSpec& s) { s.query_head_count = 1032; }},
        BadCase{"query_head_count", [](ModelSpec& s) { s.query_head_count = 33; }},
        BadCase{"kv_head_count", [](ModelSpec& s) { s.kv_head_count = 0; }},
        BadCase{"kv_head_count", [](ModelSpec& s) { s.kv_head_count = -8; }},
        BadCase{"head_dim", [](ModelSpec& s) { s.head_dim = 0; }},
        BadCase{"head_dim", [](ModelSpec& s) { s.head_dim = 100; }},
        BadCase{"head_dim", [](ModelSpec& s) { s.head_dim = 272; }},
        BadCase{"dtype", [](ModelSpec& s) { s.dtype = static_cast<DType>(7); }},
        BadCase{"softmax_scale", [](ModelSpec& s) { s.softmax_scale = -1; }},
        BadCase{"softmax_scale",
                [](ModelSpec& s) { s.softmax_scale = std::numeric_limits<double>::quiet_NaN(); }},
        BadCase{"softmax_scale",
                [](ModelSpec& s) { s.softmax_scale = std::numeric_limits<double>::infinity(); }},
        BadCase{"sink_logits",
                [](ModelSpec& s) {
                  s.sink_logits = {1, 2, 3};
                }},
        BadCase{"sink_logits", [](ModelSpec& s) { s.sink_logits.assign(32 * 32 + 1, 0.0f); }},
        BadCase{"hash_weights.rotation.bits_per_dim",
                [](ModelSpec& s) { s.hash.bits_per_dim = 0; }},
        BadCase{"hash_weights.rotation.bits_per_dim",
                [](ModelSpec& s) { s.hash.bits_per_dim = 5; }},
        BadCase{"hash_weights.rotation.value_bits", [](ModelSpec& s) { s.hash.value_bits = -1; }},
        BadCase{"hash_weights.rotation.value_bits", [](ModelSpec& s) { s.hash.value_bits = 4; }},
        BadCase{"hash_weights.mlp", [](ModelSpec& s) { Mlp(s), s.kv_head_count = 1; }},
        BadCase{"hash_weights.mlp.hash_bits", [](ModelSpec& s) { Mlp(s), s.hash.hash_bits = 0; }},
        BadCase{"hash_weights.mlp.hash_bits", [](ModelSpec& s) { Mlp(s), s.hash.hash_bits = 48; }},
        BadCase{"hash_weights.mlp.hash_bits",
                [](ModelSpec& s) { Mlp(s), s.hash.hash_bits = 1056; }},
        BadCase{"hash_weights.mlp.hash_bits",
                [](ModelSpec& s) { Mlp(s), s.hash.per_query_head = true, s.hash.hash_bits = 288; }},
        BadCase{"hash_weights.mlp.hidden_dim",
                [](ModelSpec& s) { Mlp(s), s.hash.hidden_dim = 4097; }},
        BadCase{"hash_weights.mlp.hidden_dim",
                [](ModelSpec& s) { Mlp(s), s.hash.hidden_dim = -1; }},
        BadCase{"hash_weights.mlp.residual",
                [](ModelSpec& s) { Mlp(s), s.hash.residual = true, s.hash.hash_bits = 64; }},
        BadCase{"hash_weights.mlp.residual",
                [](ModelSpec& s) { Mlp(s), s.hash.residual = true, s.hash.hidden_dim = 64; }},
        BadCase{
            "hash_weights.mlp.residual",
            [](ModelSpec& s) { Mlp(s), s.hash.residual = true, s.hash.hidden_layer_count = 2; }},
        BadCase{"hash_weights.mlp.hidden_layer_count",
                [](ModelSpec& s) { Mlp(s), s.hash.hidden_layer_count = 0; }},
        BadCase{"hash_weights.mlp.hidden_layer_count",
                [](ModelSpec& s) { Mlp(s), s.hash.hidden_layer_count = 3; }},
        BadCase{"key_indices.quest_page_token_count",
                [](ModelSpec& s) { s.indices.quest_page_token_count = 8; }},
        BadCase{"key_indices.quest_page_token_count",
                [](ModelSpec& s) { s.indices.quest_page_token_count = 48; }},
        BadCase{"key_indices.quest_page_token_count",
                [](ModelSpec& s) { s.indices.quest_page_token_count = 256; }},
        BadCase{"key_indices.quest_page_token_count",
                [](ModelSpec& s) { s.indices.quest_page_token_count = -16; }},
        BadCase{"key_indices.label_channel_count",
                [](ModelSpec& s) { s.indices.label_channel_count = 12; }},
        BadCase{"key_indices.label_channel_count",
                [](ModelSpec& s) { s.indices.label_channel_count = 136; }},
        BadCase{"key_indices.label_channel_count",
                [](ModelSpec& s) { s.indices.label_channel_count = -8; }},
        BadCase{"key_indices.lsh_table_count", [](ModelSpec& s) { Lsh(s, 513, 8); }},
        BadCase{"key_indices.lsh_table_count", [](ModelSpec& s) { Lsh(s, -1, 8); }},
        BadCase{"key_indices.lsh_bits", [](ModelSpec& s) { Lsh(s, 75, 0); }},
        BadCase{"key_indices.lsh_bits", [](ModelSpec& s) { Lsh(s, 75, 17); }},
        BadCase{"key_indices.lsh_bits", [](ModelSpec& s) { Lsh(s, 75, -1); }},
        BadCase{"key_indices.lsh_bits", [](ModelSpec& s) { Lsh(s, 0, 8); }},
        BadCase{"key_indices.lsh_table_count",
                [](ModelSpec& s) { Lsh(s, 75, 8), s.hash.raw_keys = true; }},
        BadCase{"key_indices.lsh_table_count",
                [](ModelSpec& s) { Mlp(s), Lsh(s, 75, 8), s.hash.raw_keys = true; }},
        BadCase{"hash_weights", [](ModelSpec& s) { s.hash.kind = static_cast<HashKind>(9); }}));

TEST(ModelSpec, FillsInDefaults) {
  ModelSpec spec = LlamaSpec();
  EXPECT_THAT(Normalize(spec), IsEmpty());
  EXPECT_DOUBLE_EQ(spec.softmax_scale, 1 / std::sqrt(128.0));
}

TEST(ModelSpec, KeepsAGivenScale) {
  ModelSpec spec = LlamaSpec();
  spec.softmax_scale = 0.25;
  EXPECT_THAT(Normalize(spec), IsEmpty());
  EXPECT_EQ(spec.softmax_scale, 0.25);
}

TEST(ModelSpec, ReportsEveryFault) {
  ModelSpec spec;
  EXPECT_EQ(Normalize(spec).size(), 4u);  // layers, both head counts, head_dim
}

TEST(ModelSpec, SizesOfRowsAndCodes) {
  ModelSpec spec = LlamaSpec();
  EXPECT_EQ(spec.row_bytes(), 512);
  EXPECT_EQ(spec.plane_count(), 3);
  EXPECT_EQ(spec.plane_words(), 4);
  spec.head_dim = 80;
  EXPECT_EQ(spec.plane_words(), 3);
  spec.hash.kind = HashKind::kMlp;
  spec.hash.hash_bits = 256;
  EXPECT_EQ(spec.plane_count(), 1);
  EXPECT_EQ(spec.plane_words(), 8);
  EXPECT_EQ(spec.mlp_count(), 8);
  EXPECT_EQ(spec.heads_per_code(), 4);
  spec.hash.per_query_head = true;
  EXPECT_EQ(spec.plane_words(), 32);
  EXPECT_EQ(spec.mlp_count(), 32);
  EXPECT_EQ(spec.heads_per_code(), 1);
}

TEST(ModelSpec, QueryHeadsOfAKvHeadFormEqualGroupsOfAtMost16) {
  for (const auto& [heads, group] : {std::pair(1, 1),
                                     {7, 7},
                                     {16, 16},
                                     {17, 1},
                                     {18, 9},
                                     {32, 16},
                                     {36, 12},
                                     {48, 16},
                                     {71, 1},
                                     {512, 16}}) {
    ModelSpec spec = LlamaSpec();
    spec.kv_head_count = 2;
    spec.query_head_count = 2 * heads;
    EXPECT_THAT(Normalize(spec), IsEmpty()) << heads;
    EXPECT_EQ(spec.query_heads_per_kv_head(), heads);
    EXPECT_EQ(spec.group(), group) << heads;
    EXPECT_EQ(spec.groups_per_kv_head(), heads / group) << heads;
    EXPECT_EQ(spec.group_count(), 2 * heads / group) << heads;
    EXPECT_EQ(spec.KvHeadOf(heads / group - 1), 0) << heads;
    EXPECT_EQ(spec.KvHeadOf(heads / group), 1) << heads;
  }
}

TEST(ModelSpec, MlpsServeAtMost16QueryHeadsForEachKvHead) {
  ModelSpec spec = LlamaSpec();
  Mlp(spec);
  spec.kv_head_count = 2;
  EXPECT_THAT(Normalize(spec), IsEmpty());
  spec.kv_head_count = 1;
  EXPECT_THAT(Normalize(spec),
              Contains(Field(&FieldError::description,
                             "serves at most 16 query heads for each KV head, not 32")));
}

TEST(ModelSpec, SaysHowManyBitsAKeyWouldHave) {
  ModelSpec spec = LlamaSpec();
  spec.hash.kind = HashKind::kMlp;
  spec.hash.per_query_head = true;
  spec.hash.hash_bits = 512;
  EXPECT_THAT(Normalize(spec),
              Contains(Field(&FieldError::description,
                             "value 512 for each of 4 query heads is 2048 bits a key, more than "
                             "1024")));
}

TEST(ModelSpec, KnowsWhatItKeepsAndAwaits) {
  ModelSpec spec = LlamaSpec();
  spec.hash.kind = HashKind::kNone;
  EXPECT_FALSE(spec.has_index());
  EXPECT_FALSE(spec.has_weights());
  for (const auto& [indices, weights] :
       {std::pair(KeyIndexSpec{.int4_keys = true}, false),
        std::pair(KeyIndexSpec{.quest_page_token_count = 16}, false),
        std::pair(KeyIndexSpec{.label_channel_count = 8}, true),
        std::pair(KeyIndexSpec{.lsh_table_count = 1, .lsh_bits = 1}, false)}) {
    spec.indices = indices;
    EXPECT_TRUE(indices.any());
    EXPECT_TRUE(spec.has_index());
    EXPECT_EQ(spec.has_weights(), weights);
  }
  spec.indices = {};
  Mlp(spec);
  EXPECT_TRUE(spec.has_weights());
}

}  // namespace
}  // namespace spillway

#include "host/model/model_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

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

// One change to a good spec, and the field that it is refused for.
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
        BadCase{"kv_head_count", [](ModelSpec& s) { s.kv_head_count = 1; }},
        BadCase{"head_dim", [](ModelSpec& s) { s.head_dim = 0; }},
        BadCase{"head_dim", [](ModelSpec& s) { s.head_dim = 100; }},
        BadCase{"head_dim", [](ModelSpec& s) { s.head_dim = 272; }},
        BadCase{"dtype", [](ModelSpec& s) { s.dtype = static_cast<DType>(7); }},
        BadCase{"softmax_scale", [](ModelSpec& s) { s.softmax_scale = -1; }},
        BadCase{"softmax_scale",
                [](ModelSpec& s) { s.softmax_scale = std::numeric_limits<double>::quiet_NaN(); }},
        BadCase{"softmax_scale",
                [](ModelSpec& s) { s.softmax_scale = std::numeric_limits<double>::infinity(); }},
        BadCase{"hash_weights.rotation.bits_per_dim",
                [](ModelSpec& s) { s.hash.bits_per_dim = 0; }},
        BadCase{"hash_weights.rotation.bits_per_dim",
                [](ModelSpec& s) { s.hash.bits_per_dim = 5; }},
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
        BadCase{"hash_weights", [](ModelSpec& s) { s.hash.kind = static_cast<HashKind>(9); }}));

TEST(ModelSpec, FillsInDefaults) {
  ModelSpec spec = LlamaSpec();
  EXPECT_THAT(Normalize(spec), IsEmpty());
  EXPECT_DOUBLE_EQ(spec.softmax_scale, 1 / std::sqrt(128.0));

  spec.hash.kind = HashKind::kMlp;
  spec.hash.residual = true;
  EXPECT_THAT(Normalize(spec), IsEmpty());
  EXPECT_EQ(spec.hash.hidden_dim, 128);
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
  EXPECT_EQ(spec.plane_count(), 2);
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
  EXPECT_THAT(Normalize(spec), IsEmpty());
  EXPECT_EQ(spec.plane_words(), 32);
  EXPECT_EQ(spec.mlp_count(), 32);
  EXPECT_EQ(spec.heads_per_code(), 1);
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

}  // namespace
}  // namespace spillway

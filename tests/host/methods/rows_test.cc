// The optional methods' rows in the table of methods.
#include <gtest/gtest.h>

#include <map>

#include "host/cpu/cpu_method.h"
#include "host/methods/weights/key_sections.h"
#include "host/policy/methods.h"

namespace spillway {
namespace {

// 2 KV heads with 4 query heads each, d 128, bf16, 3 bits per dimension.
ModelSpec Spec(const KeyIndexSpec& indices = {}) {
  ModelSpec spec;
  spec.layer_count = 1;
  spec.query_head_count = 8;
  spec.kv_head_count = 2;
  spec.head_dim = 128;
  spec.indices = indices;
  EXPECT_TRUE(Normalize(spec).empty());
  return spec;
}

TEST(SelectorMethods, TellWhatTheyReadOfAKey) {
  const ModelSpec spec =
      Spec({.int4_keys = true, .quest_page_token_count = 32, .label_channel_count = 16});
  const auto bits = [&](Selector selector) { return MethodOf(selector).key_bits(spec); };
  // 3 planes of 16 bytes, a factor, a norm, and the share of a page's centre.
  EXPECT_EQ(bits(Selector::kAsymmetric), 8 * 53);
  EXPECT_EQ(bits(Selector::kHamming), 8 * 16);         // one plane
  EXPECT_EQ(bits(Selector::kOracle), 8 * 256);         // the key itself
  EXPECT_EQ(bits(Selector::kInt4Keys), 8 * 68);        // 64 bytes and a range
  EXPECT_EQ(bits(Selector::kDoubleSparsity), 8 * 12);  // 8 bytes and a range
  EXPECT_EQ(bits(Selector::kQuest), 8 * 16);           // 2 bounds of 256 bytes for 32 keys
  EXPECT_EQ(bits(Selector::kAll), 0);
}

// The bits that the table names are those that the sections of index pages hold.
TEST(SelectorMethods, ReadWhatIndexPagesHold) {
  const auto page_bits = [](const ModelSpec& spec) {
    return 8 * KeySections::Of(spec).bytes() / kPageTokenCount;
  };
  for (const auto& [selector, indices] :
       {std::pair(Selector::kInt4Keys, KeyIndexSpec{.int4_keys = true}),
        std::pair(Selector::kQuest, KeyIndexSpec{.quest_page_token_count = 16}),
        std::pair(Selector::kDoubleSparsity, KeyIndexSpec{.label_channel_count = 24})}) {
    const ModelSpec spec = Spec(indices);
    EXPECT_EQ(MethodOf(selector).key_bits(spec), page_bits(spec)) << MethodOf(selector).name;
  }
}

// The order is fixed, so index pages are the same bytes on every device.
TEST(OptionalMethods, StandInTheOrderOfSections) {
  ModelSpec spec = Spec({.int4_keys = true,
                         .quest_page_token_count = 32,
                         .label_channel_count = 16,
                         .lsh_table_count = 75,
                         .lsh_bits = 8});
  const KeySections sections = KeySections::Of(spec);
  std::map<const void*, int64_t> offsets;  // by the address of the method's row
  int64_t end = 0;
  for (const Method* method : OptionalMethods()) {
    if (method->cpu->section_bytes == nullptr) continue;
    const void* row = method->selector;
    offsets[row != nullptr ? row : method->tail] = end;
    end += method->cpu->section_bytes(spec);
  }
  EXPECT_EQ(offsets.at(&MethodOf(Selector::kInt4Keys)), sections.int4_keys());
  EXPECT_EQ(offsets.at(&MethodOf(Selector::kDoubleSparsity)), sections.labels());
  EXPECT_EQ(offsets.at(&MethodOf(Selector::kQuest)), sections.bounds());
  EXPECT_EQ(offsets.at(&MethodOf(Tail::kLshSampling)), sections.buckets());
  EXPECT_EQ(end, sections.bytes());
  EXPECT_EQ(IndexPageBytes(spec), CodeLayout::Of(spec).page_bytes() + sections.bytes());
  // The codes of MLPs are stored where those of a rotation would be.
  spec.hash = {.kind = HashKind::kMlp};
  ASSERT_TRUE(Normalize(spec).empty());
  EXPECT_EQ(OptionalMethods()[0]->cpu->section_bytes(spec), CodeLayout::Of(spec).page_bytes());
  EXPECT_EQ(IndexPageBytes(spec), CodeLayout::Of(spec).page_bytes() + sections.bytes());
}

}  // namespace
}  // namespace spillway

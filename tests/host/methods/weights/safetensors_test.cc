#include "host/methods/weights/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "tests/host/methods/weights/safetensors_file.h"

namespace spillway {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kShape23[] = {2, 3};
constexpr int64_t kShape2[] = {2};

TEST(SafeTensors, ReadsTensorsByName) {
  SafeTensorsWriter writer;
  writer.Add("a", {2, 3}, {1, 2, 3, 4, 5, 6});
  writer.Add("scalar", {}, {0.5});
  writer.Add("empty", {0, 7}, {});
  const auto bytes = writer.File();
  const auto file = SafeTensors::Parse(bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_THAT(*file->Load("a", kShape23), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_THAT(*file->Load("scalar", {}), ElementsAre(0.5));
  EXPECT_TRUE(file->Contains("empty"));
  EXPECT_FALSE(file->Contains("b"));
}

TEST(SafeTensors, ConvertsBothHalves) {
  // As fp16: 1, -2, the smallest subnormal, and the largest number. As bf16: 1, -2 and 2^-133.
  const std::string data("\x00\x3c\x00\xc0\x01\x00\xff\x7b\x80\x3f\x00\xc0\x01\x00", 14);
  const auto bytes = RawSafeTensors(R"({"__metadata__":{"format":"pt"},)"
                                    R"("h":{"dtype":"F16","shape":[4],"data_offsets":[0,8]},)"
                                    R"("b":{"dtype":"BF16","shape":[3],"data_offsets":[8,14]}}   )",
                                    data);
  const auto file = SafeTensors::Parse(bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_THAT(*file->Load("h", std::vector<int64_t>{4}),
              ElementsAre(1, -2, std::ldexp(1.0f, -24), 65504));
  EXPECT_THAT(*file->Load("b", std::vector<int64_t>{3}),
              ElementsAre(1, -2, std::ldexp(1.0f, -133)));
}

TEST(SafeTensors, LoadNamesWhatIsWrong) {
  SafeTensorsWriter writer;
  writer.Add("a", {2, 3}, {1, 2, 3, 4, 5, 6});
  writer.Add("bad", {2}, {1, std::numeric_limits<float>::infinity()});
  const auto bytes = writer.File();
  const auto file = SafeTensors::Parse(bytes);
  ASSERT_TRUE(file.ok());
  const absl::Status missing = file->Load("layers.0.w1", kShape23).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("\"layers.0.w1\" is missing"));
  EXPECT_THAT(std::string(file->Load("a", kShape2).status().message()), HasSubstr("[2, 3]"));
  EXPECT_THAT(std::string(file->Load("bad", kShape2).status().message()), HasSubstr("element 1"));
}

TEST(SafeTensors, OtherTypesMayStandInTheFileButNotBeLoaded) {
  const auto bytes = RawSafeTensors(R"({"n":{"dtype":"I64","shape":[2],"data_offsets":[0,16]}})",
                                    std::string(16, '\0'));
  const auto file = SafeTensors::Parse(bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_THAT(std::string(file->Load("n", kShape2).status().message()), HasSubstr("I64"));
}

struct Malformed {
  const char* header;
  const char* message;
  int data_bytes = 8;
  int64_t header_bytes = -1;
};

class MalformedFile : public ::testing::TestWithParam<Malformed> {};

TEST_P(MalformedFile, IsRefused) {
  const Malformed& c = GetParam();
  const auto bytes = RawSafeTensors(c.header, std::string(c.data_bytes, '\0'), c.header_bytes);
  const absl::Status status = SafeTensors::Parse(bytes).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.header;
  EXPECT_THAT(std::string(status.message()), HasSubstr(c.message));
}

INSTANTIATE_TEST_SUITE_P(
    SafeTensors, MalformedFile,
    ::testing::Values(
        Malformed{"{}", "ends beyond", 0, 3}, Malformed{"{}", "longer than", 8, 1 << 30},
        Malformed{"{}", "longer than", 8, std::numeric_limits<int64_t>::max()},
        Malformed{"", "not a JSON object", 0}, Malformed{"[]", "not a JSON object", 0},
        Malformed{"7", "not a JSON object", 0}, Malformed{"{\"a\":", "not a JSON object"},
        Malformed{"{} x", "not a JSON object", 0}, Malformed{"{\"\xff\":1}", "not a JSON object"},
        Malformed{"{\"a\":[[[[[[]]]]]]}", "deeper"}, Malformed{"{}", "8 bytes of data"},
        Malformed{R"({"a":7})", "\"a\" lacks"}, Malformed{R"({"a":{}})", "\"a\" lacks"},
        Malformed{R"({"a":{"dtype":1,"shape":[2],"data_offsets":[0,8]}})", "\"a\" lacks"},
        Malformed{R"({"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})", "shape"},
        Malformed{R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", "shape"},
        Malformed{R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", "shape"},
        Malformed{R"({"a":{"dtype":"F32","shape":["2"],"data_offsets":[0,8]}})", "shape"},
        Malformed{R"({"a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,2],"data_offsets":[0,8]}})",
                  "shape"},
        Malformed{R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8]}})",
                  "shape"},
        Malformed{R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}})",
                  "overflows"},
        Malformed{R"({"a":{"dtype":"F32","shape":[4611686018427387906],"data_offsets":[0,8]}})",
                  "8 bytes for 4611686018427387906"},
        Malformed{R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", "data_offsets"},
        Malformed{R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}})", "data_offsets"},
        Malformed{R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", "data_offsets"},
        Malformed{R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}})", "data_offsets"},
        Malformed{R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})", "outside"},
        Malformed{R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,9223372036854775807]}})",
                  "outside"},
        Malformed{R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", "8 bytes for 3"},
        Malformed{R"({"a":{"dtype":"F16","shape":[3],"data_offsets":[0,7]}})", "7 bytes for 3"},
        Malformed{R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", "starts at 4"},
        Malformed{R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "end at 4"},
        Malformed{R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                  R"("b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                  "\"b\" starts at 4"},
        Malformed{R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                  R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
                  "\"a\" is named twice"}));

TEST(SafeTensors, ShorterThanItsLength) {
  const std::vector<std::byte> bytes(7);
  EXPECT_FALSE(SafeTensors::Parse(bytes).ok());
  EXPECT_FALSE(SafeTensors::Parse({}).ok());
}

TEST(SafeTensors, ADeeplyNestedHeaderIsRefusedCheaply) {
  const auto bytes = RawSafeTensors("{\"a\":" + std::string(1 << 21, '['), "");
  EXPECT_FALSE(SafeTensors::Parse(bytes).ok());
}

// Whatever one byte is changed to, the file is refused, or every read stays inside it.
TEST(SafeTensors, SurvivesEveryBrokenByte) {
  SafeTensorsWriter writer;
  writer.Add("a", {2, 3}, {1, 2, 3, 4, 5, 6});
  writer.Add("b", {2}, {7, 8});
  const auto good = writer.File();
  std::mt19937 rng(5);
  int parsed = 0;
  for (size_t i = 0; i < good.size(); ++i) {
    for (int trial = 0; trial < 16; ++trial) {
      // An exact copy on the heap, so that a sanitizer sees a read beyond it.
      auto bytes = good;
      bytes[i] = std::byte(rng());
      const auto file = SafeTensors::Parse(bytes);
      if (!file.ok()) continue;
      ++parsed;
      for (const char* name : {"a", "b"}) {
        const auto values = name[0] == 'a' ? file->Load(name, kShape23) : file->Load(name, kShape2);
        if (!values.ok()) continue;
        EXPECT_EQ(values->size(), name[0] == 'a' ? 6u : 2u);
      }
    }
  }
  EXPECT_GT(parsed, 0);
}

}  // namespace
}  // namespace spillway

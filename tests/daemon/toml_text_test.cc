#include "daemon/config/toml_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace spillway {
namespace {

using testing::HasSubstr;

std::string Times(int count, const std::string& text) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

TEST(TomlText, WhatIsNestedTooDeeplyForTheParserIsRefused) {
  for (const int count : {17, 200}) {
    for (const std::string& text : {
             "a = " + Times(count, "["),
             "a = " + Times(count, "[") + "1" + Times(count, "]"),
             "a = " + Times(count, "[\n#]\n"),
             "a = " + Times(count, "{a="),
             Times(count, "a.") + "a = 1",
             Times(count, "'a' . ") + "a = 1",
             "[" + Times(count, "a.") + "a]",
             "[[" + Times(count, "a.") + "a]]",
             // Brackets in strings and comments close nothing.
             "a = [" + Times(count, "']', [\"]\\\"]\", "),
             "a = [\"\"\"]\"\"\"\"\", " + Times(count, "["),
             "a = ['''\n]''\n''', # ]\n" + Times(count, "["),
         }) {
      const absl::Status status = ParseToml("# first\n" + text, "f.toml").status();
      ASSERT_TRUE(absl::IsInvalidArgument(status)) << text.substr(0, 60);
      EXPECT_THAT(std::string(status.message()),
                  testing::MatchesRegex("f.toml: line [0-9]+ is nested more than 16 levels deep"))
          << text.substr(0, 60);
    }
  }
}

TEST(TomlText, WhatOnlyLooksNestedIsNot) {
  const std::string many = Times(1000, "[");
  for (const std::string& text : {
           "a = '" + many + "'",
           "a = \"" + many + "\\\"" + many + "\"",
           "a = '''" + many + "\n" + many + "'''",
           "a = \"\"\"" + many + "\\\"\"\"" + many + "\"\"\"",
           "a = 1 # " + many,
           "a = [" + Times(100, "[1.5, 2.5], ") + "]",
           Times(100, "[[a]]\nb = {c = [1.5]}\n"),
       }) {
    EXPECT_TRUE(ParseToml(text, "f.toml").ok()) << ParseToml(text, "f.toml").status();
  }
  EXPECT_EQ(ParseToml("a.b = [[3]]", "f.toml")->at("a").at("b").at(0).at(0).as_integer(), 3);
}

// The check of the lines comes first, so nesting over many lines is what reaches the parser's
// stack.
TEST(TomlText, DeepNestingOverManyLinesIsRefusedToo) {
  for (const char* part : {"[\n", "[[[[[[[[[[[[[[\n", "{a=\n"}) {
    EXPECT_THAT(std::string(ParseToml("a = " + Times(200'000, part), "f").status().message()),
                HasSubstr("is nested more than 16 levels deep"));
  }
}

TEST(TomlText, LinesThatTakeMinutesAreRefused) {
  EXPECT_TRUE(ParseToml("a = [" + Times(2000, "1,") + "]", "f.toml").ok());
  EXPECT_EQ(ParseToml("a = 1\nb = [" + Times(500'000, "1,") + "]", "f.toml").status(),
            absl::InvalidArgumentError("f.toml: line 2 has more than 4096 bytes"));
}

TEST(TomlText, ErrorsNameTheFileAndAreShort) {
  const absl::Status status = ParseToml("a = " + Times(4000, "x"), "f.toml").status();
  EXPECT_THAT(std::string(status.message()), testing::StartsWith("f.toml: "));
  EXPECT_LT(status.message().size(), 1100);
  for (const char* text : {"\"", "'", "\"\"\"", "'''", "a = \"\\", "a = \"b\n[[[", "]]]]", "}"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseToml(text, "f.toml").status())) << text;
  }
}

}  // namespace
}  // namespace spillway

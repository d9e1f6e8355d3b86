#include "services/convert/trace.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace spillway {
namespace {

constexpr char kTrace[] = "0af7651916cd43dd8448eb211c80319c";

TEST(Trace, ATraceparentGivesTheTracesId) {
  EXPECT_EQ(TraceIdOf(absl::StrCat("00-", kTrace, "-b7ad6b7169203331-01")), kTrace);
  // A later version may have more fields.
  EXPECT_EQ(TraceIdOf(absl::StrCat("01-", kTrace, "-b7ad6b7169203331-01-what-else")), kTrace);
}

TEST(Trace, WhatIsNoTraceparentGivesNone) {
  const std::string zeros(32, '0');
  for (const std::string& text : {
           std::string(),
           std::string("00"),
           std::string(kTrace),
           absl::StrCat("00-", kTrace, "-b7ad6b7169203331"),
           absl::StrCat("00-", kTrace, "-b7ad6b7169203331-0"),
           absl::StrCat("00-", kTrace, "-b7ad6b7169203331-01-more"),
           absl::StrCat("01-", kTrace, "-b7ad6b7169203331-01x"),
           absl::StrCat("ff-", kTrace, "-b7ad6b7169203331-01"),
           absl::StrCat("0x-", kTrace, "-b7ad6b7169203331-01"),
           absl::StrCat("00-", zeros, "-b7ad6b7169203331-01"),
           absl::StrCat("00-", kTrace, "-0000000000000000-01"),
           absl::StrCat("00_", kTrace, "-b7ad6b7169203331-01"),
           std::string("00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01"),
           std::string("00-0af7651916cd43dd8448eb211c8031\n\"-b7ad6b7169203331-01"),
           absl::StrCat("00-", kTrace, "-b7ad6b716920333g-01"),
           absl::StrCat("00-", kTrace, "-b7ad6b7169203331-\n1"),
       }) {
    EXPECT_EQ(TraceIdOf(text), "") << text;
  }
}

TEST(Trace, ARequestsIdIsTakenAsItIs) {
  for (const char* text :
       {"7", "f058ebd6-02f7-4d3f-942e-904344e8cde5", "Root=1-5759e988-bd862e3fe1be46a994272793"}) {
    EXPECT_EQ(RequestIdOf(text), text);
  }
  EXPECT_EQ(RequestIdOf(std::string(128, 'a')).size(), 128);
  for (const std::string& text : {std::string(), std::string(129, 'a'), std::string("two words"),
                                  std::string("a\nb"), std::string("\"a\""), std::string("\xff")}) {
    EXPECT_EQ(RequestIdOf(text), "") << text;
  }
}

TEST(Trace, AFieldThatIsNoIdIsRefusedWithItsValueAndTheLimit) {
  EXPECT_TRUE(CheckTraceId("").ok());
  EXPECT_TRUE(CheckTraceId(kTrace).ok());
  EXPECT_EQ(CheckTraceId("a\nb").message(),
            "trace_id: \"a\\nb\", 3 characters, is not 1 to 128 characters of [A-Za-z0-9._:=+/-]");
  EXPECT_EQ(CheckTraceId(std::string(5000, 'a')).message(),
            absl::StrCat("trace_id: \"", std::string(128, 'a'),
                         "\", 5000 characters, is not 1 to 128 characters of [A-Za-z0-9._:=+/-]"));
}

}  // namespace
}  // namespace spillway

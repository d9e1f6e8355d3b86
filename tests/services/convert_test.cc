#include <limits>
#include <string>

#include "absl/strings/ascii.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "host/policy/methods.h"
#include "services/convert/attend.h"

namespace spillway {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Every field has a different value.
TEST(FillCertificate, CarriesEachFieldWhereItBelongs) {
  JobItem item;
  Policy& policy = item.attend.emplace().policy;
  policy.epsilon = 0.3;
  policy.delta = 0.07;
  policy.inflation = 1.5;
  item.result.certificates = {
      {101, 11, 21, 0.25f, 0.75f, Promise::kStatistical},
      {102, 12, 22, 0, 0.5f, Promise::kExact},
      {103, 13, 23, std::numeric_limits<float>::infinity(), 0.125f, Promise::kNone}};
  v1::Certificate certificate;
  FillCertificate(item, certificate);
  EXPECT_THAT(certificate.visible_token_counts(), ElementsAre(101, 102, 103));
  EXPECT_THAT(certificate.heavy_token_counts(), ElementsAre(11, 12, 13));
  EXPECT_THAT(certificate.sampled_token_counts(), ElementsAre(21, 22, 23));
  EXPECT_THAT(certificate.relative_errors(),
              ElementsAre(0.25f, 0, std::numeric_limits<float>::infinity()));
  EXPECT_THAT(certificate.tail_masses(), ElementsAre(0.75f, 0.5f, 0.125f));
  EXPECT_THAT(certificate.promises(),
              ElementsAre(v1::PROMISE_STATISTICAL, v1::PROMISE_EXACT, v1::PROMISE_NONE));
  EXPECT_EQ(certificate.epsilon(), 0.3);
  EXPECT_EQ(certificate.delta(), 0.07);
  EXPECT_EQ(certificate.inflation(), 1.5);
  EXPECT_THAT(certificate.head_inflations(), IsEmpty());
}

// Only the inflation of heads that the audit has raised differs from the request.
TEST(FillCertificate, NamesWhatHeadsWereGiven) {
  JobItem item;
  AttendQuery& attend = item.attend.emplace();
  attend.policy.inflation = 1.5;
  attend.tails.assign(2, attend.policy);
  attend.tails[1].inflation = 2.25;
  item.result.certificates.resize(1);
  v1::Certificate certificate;
  FillCertificate(item, certificate);
  EXPECT_EQ(certificate.inflation(), 1.5);
  EXPECT_THAT(certificate.head_inflations(), ElementsAre(1.5, 2.25));
}

// Methods have the API's names.
TEST(Methods, HaveTheApisNames) {
  for (const SelectorMethod* method : SelectorMethods()) {
    const auto value = static_cast<v1::Selector>(static_cast<int>(method->selector) + 1);
    EXPECT_EQ(v1::Selector_Name(value),
              "SELECTOR_" + absl::AsciiStrToUpper(std::string(method->name)));
  }
  for (const TailMethod* method : TailMethods()) {
    const auto value = static_cast<v1::Tail>(static_cast<int>(method->tail) + 1);
    EXPECT_EQ(v1::Tail_Name(value), "TAIL_" + absl::AsciiStrToUpper(std::string(method->name)));
  }
}

}  // namespace
}  // namespace spillway

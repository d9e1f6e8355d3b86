#include "daemon/access/token_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/errors.h"
#include "tests/host/memory/scratch_folder.h"

namespace spillway {
namespace {

// An entry of the file, for the token "secret-NAME".
std::string Entry(const std::string& name, const std::string& name_space,
                  const std::string& more = "") {
  const TokenDigest digest = DigestOf("secret-" + name);
  const std::string bytes(digest.begin(), digest.end());
  return absl::StrCat("[[token]]\nname = \"", name, "\"\nnamespace = \"", name_space,
                      "\"\nsha256 = \"", absl::BytesToHexString(bytes), "\"\n", more);
}

class TokenTableTest : public ::testing::Test {
 protected:
  // Opens the table with this text, or lets it read the file again.
  void Write(const std::string& text) {
    const std::string path = scratch_.File("tokens");
    std::ofstream(path) << text;
    ASSERT_EQ(chmod(path.c_str(), 0600), 0);
    if (table_ == nullptr) {
      table_ = *TokenTable::Open(path, &accounts_);
    } else {
      ASSERT_TRUE(*table_->Reload());
    }
  }
  Caller Of(const std::string& name) const {
    return *table_->Authenticate("Bearer secret-" + name);
  }

  ScratchFolder scratch_;
  AccountTable accounts_;
  std::unique_ptr<TokenTable> table_;
};

TEST_F(TokenTableTest, ATokenThatMovesHasItsNewNamespaceAndEndsWhatWasOpen) {
  Write(Entry("alice", "red") + Entry("bob", "red"));
  const Caller alice = Of("alice"), bob = Of("bob");
  EXPECT_EQ(alice.name_space(), "red");
  Write(Entry("alice", "blue") + Entry("bob", "red"));
  EXPECT_EQ(Of("alice").name_space(), "blue");
  EXPECT_TRUE(Of("alice").Check().ok());
  EXPECT_EQ(DetailsOf(alice.Check()).reason, "TOKEN_REVOKED");
  // The other entry is as before, and so are its open streams.
  EXPECT_EQ(Of("bob").name_space(), "red");
  EXPECT_TRUE(bob.Check().ok());
}

TEST_F(TokenTableTest, AChangedQuotaOrPlaceEndsNothingThatIsOpen) {
  Write(Entry("alice", "red") + Entry("bob", "blue"));
  const Caller alice = Of("alice");
  Write(Entry("bob", "blue") + Entry("alice", "red", "bytes_max = 1000\n"));
  EXPECT_TRUE(alice.Check().ok());
  EXPECT_EQ(accounts_.Of("red")->quota().bytes_max, 1000);
  EXPECT_EQ(accounts_.Of("blue")->quota().bytes_max, 0);
}

}  // namespace
}  // namespace spillway

// The code that docs/adding-a-selector.md shows must equal that of the files.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <vector>

namespace spillway {
namespace {

std::string Read(const std::string& path) {
  std::ifstream file(std::string(SPILLWAY_ROOT "/") + path);
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<std::vector<std::string>> Matches(const std::string& text, const char* pattern) {
  std::vector<std::vector<std::string>> found;
  const std::regex regex(pattern);
  for (auto m = std::sregex_iterator(text.begin(), text.end(), regex); m != std::sregex_iterator();
       ++m) {
    found.emplace_back(m->begin(), m->end());
  }
  return found;
}

class Page : public ::testing::Test {
 protected:
  const std::string text_ = Read("docs/adding-a-selector.md");
};

TEST_F(Page, CodeBlocksStandInTheExample) {
  const std::string folder = "tests/methods/example/";
  const std::string example = Read(folder + "prefix.h") + Read(folder + "prefix.cc") +
                              Read(folder + "registry.cc") + Read(folder + "prefix_test.cc");
  const auto blocks = Matches(text_, "```cpp\n([^`]*)```");
  EXPECT_GE(blocks.size(), 4u);
  EXPECT_EQ(Matches(text_, "\n```").size(), 2 * blocks.size()) << "a block of another kind";
  for (const auto& block : blocks) {
    EXPECT_NE(example.find(block[1]), std::string::npos) << block[1];
  }
}

// For each file, the page names a line that another selector has there.
TEST_F(Page, LinesStandInTheirFiles) {
  const auto lines = Matches(text_, "\\| `([^`]+)` \\| `([^`]+)` \\|");
  EXPECT_EQ(lines.size(), 3u);
  for (const auto& line : lines) {
    EXPECT_NE(Read(line[1]).find(line[2]), std::string::npos) << line[1] << ": " << line[2];
  }
}

}  // namespace
}  // namespace spillway

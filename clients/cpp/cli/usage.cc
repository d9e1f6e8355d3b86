#include "cli/usage.h"

#include <algorithm>
#include <numeric>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace spillway::cli {
namespace {

// Levenshtein distance: insertions, deletions and replacements that turn one word into the other.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);  // distances of a's first i characters to b's first j
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0]++;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j + 1] + 1, row[j] + 1});
    }
  }
  return row.back();
}

std::string NoSuchCommand(const std::string& word, const std::vector<std::string>& commands) {
  const auto distance = [&](const std::string& command) { return EditDistance(word, command); };
  const auto nearest = std::min_element(
      commands.begin(), commands.end(),
      [&](const std::string& a, const std::string& b) { return distance(a) < distance(b); });
  // If more than half of the word differs, a suggestion would be a guess.
  const bool near = 2 * distance(*nearest) <= std::max(word.size(), nearest->size());
  return absl::StrCat("there is no command \"", word, "\"; ",
                      near ? absl::StrCat("did you mean \"", *nearest, "\"?")
                           : absl::StrCat("commands are ", absl::StrJoin(commands, ", ")));
}

}  // namespace

std::string UsageMessage(const CLI::App& app, const CLI::ParseError& error) {
  // Find the innermost command that was recognised.
  const CLI::App* at = &app;
  while (!at->get_subcommands().empty()) at = at->get_subcommands().front();
  std::vector<std::string> commands;
  for (const CLI::App* command : at->get_subcommands([](const CLI::App*) { return true; })) {
    commands.push_back(command->get_name());
  }
  const std::vector<std::string> rest = app.remaining(/*recurse=*/true);
  const auto word = std::find_if(rest.begin(), rest.end(), [](const std::string& argument) {
    return !argument.empty() && argument.front() != '-';
  });
  // If an unknown option comes first, the word may be its value.
  const bool option_first = !rest.empty() && rest.front().starts_with('-');
  if (!commands.empty() && word != rest.end() && !option_first) {
    return NoSuchCommand(*word, commands);
  }
  if (option_first) return absl::StrCat("there is no option ", rest.front());
  return error.what();
}

}  // namespace spillway::cli

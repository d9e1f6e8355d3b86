#include "cli/lab.h"

#include <unistd.h>

#include <cerrno>

namespace spillway::cli {

absl::Status RunLabSize(const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {"spillway-lab", "size"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  execvp(argv.front(), argv.data());
  if (errno == ENOENT) {
    return absl::NotFoundError(
        "size runs spillway-lab of the Python package, which is not in PATH: "
        "pip install 'spillway-kv[lab]'");
  }
  return absl::ErrnoToStatus(errno, "spillway-lab cannot be run");
}

}  // namespace spillway::cli

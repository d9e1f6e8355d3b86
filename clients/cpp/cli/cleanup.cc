#include "cli/cleanup.h"

#include <iostream>
#include <utility>

namespace spillway::cli {

TemporaryResources::~TemporaryResources() {
  if (absl::Status status = Delete(); !status.ok()) {
    std::cerr << "spillway: temporary resources were left behind: " << status.message() << '\n';
  }
}

absl::Status TemporaryResources::Delete() {
  absl::Status status;
  if (!sequence_.empty()) status.Update(client_.DeleteSequence(std::exchange(sequence_, "")));
  if (!model_.empty()) status.Update(client_.DeleteModel(std::exchange(model_, "")));
  return status;
}

}  // namespace spillway::cli

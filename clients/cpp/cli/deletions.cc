#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "cli/commands.h"
#include "cli/json.h"
#include "cli/output.h"

namespace spillway::cli {
namespace {

// collection: of the names; empty: they have none.
std::vector<absl::Status> Delete(
    const std::string& collection, const std::vector<std::string>& names, const CallOptions& call,
    const Output& output,
    absl::FunctionRef<absl::Status(const std::string& name, const CallOptions& call)> remove) {
  std::vector<absl::Status> failures;
  Json deleted = Json::array();
  for (const std::string& given : names) {
    const std::string name = collection.empty() ? given : FullName(collection, given);
    if (call.stop.stop_requested()) {
      failures.push_back(absl::CancelledError(absl::StrCat("interrupted before ", name)));
      break;
    }
    const absl::Status status = remove(name, call);
    if (!status.ok()) {
      failures.push_back(status);
    } else if (output.json) {
      deleted.push_back(name);
    } else {
      output.out << "deleted " << name << '\n';
    }
  }
  if (output.json) output.out << Json{{"deleted", std::move(deleted)}}.dump(2) << '\n';
  return failures;
}

}  // namespace

std::vector<absl::Status> DeleteModels(Client& client, const std::vector<std::string>& names,
                                       const CallOptions& call, const Output& output) {
  return Delete("models", names, call, output,
                [&](const std::string& name, const CallOptions& options) {
                  return client.DeleteModel(name, options);
                });
}

std::vector<absl::Status> DeleteSequences(Client& client, const std::vector<std::string>& names,
                                          const CallOptions& call, const Output& output) {
  return Delete("sequences", names, call, output,
                [&](const std::string& name, const CallOptions& options) {
                  return client.DeleteSequence(name, options);
                });
}

std::vector<absl::Status> DeleteSnapshots(Client& client, const std::vector<std::string>& names,
                                          const CallOptions& call, const Output& output) {
  return Delete("", names, call, output, [&](const std::string& name, const CallOptions& options) {
    return client.DeleteSnapshot(name, options);
  });
}

}  // namespace spillway::cli

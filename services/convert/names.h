#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace spillway {

// The client's id in a resource name "{collection}/{id}". INVALID_ARGUMENT names the
// field.
absl::StatusOr<std::string> ParseName(std::string_view name, std::string_view collection,
                                      const std::string& field);
// The id of something to create: the client's, or a random one if that is empty. INVALID_ARGUMENT
// names the field.
absl::StatusOr<std::string> ChooseId(const std::string& id, const std::string& field);

// The page of a list that a client asks for. size is in [1, 1000]; after is the last id of the page
// before.
struct PageRequest {
  int64_t size = 0;
  std::string after;
};
absl::StatusOr<PageRequest> ParsePage(int32_t page_size, const std::string& page_token,
                                      int64_t size_default = 100);
// The token with which a client lists what follows `last_id`; opaque to clients.
std::string PageToken(std::string_view last_id);

}  // namespace spillway

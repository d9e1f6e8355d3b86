#include "services/convert/names.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/errors.h"
#include "engine/registry.h"
#include "host/base/random_id.h"

namespace spillway {
namespace {

constexpr int kPageSizeMax = 1000;
constexpr char kTokenVersion = '1';

}  // namespace

absl::StatusOr<std::string> ParseName(std::string_view name, std::string_view collection,
                                      const std::string& field) {
  if (name.size() > collection.size() && name.starts_with(collection) &&
      name[collection.size()] == '/') {
    const std::string_view id = name.substr(collection.size() + 1);
    if (Registry::IsValidId(id)) return std::string(id);
  }
  return InvalidField(field, absl::StrCat("\"", absl::CHexEscape(std::string(name.substr(0, 100))),
                                          "\" is not ", std::string(collection), "/{id}"));
}

absl::StatusOr<std::string> ChooseId(const std::string& id, const std::string& field) {
  if (id.empty()) return RandomId();
  if (Registry::IsValidId(id)) return id;
  return InvalidField(field,
                      absl::StrCat("\"", absl::CHexEscape(id.substr(0, 100)),
                                   "\" does not match [a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?"));
}

absl::StatusOr<PageRequest> ParsePage(int32_t page_size, const std::string& page_token,
                                      int64_t size_default) {
  if (page_size < 0 || page_size > kPageSizeMax) {
    return InvalidField("page_size",
                        absl::StrCat("value ", page_size, " is not in [0, ", kPageSizeMax, "]"));
  }
  PageRequest page;
  page.size = page_size == 0 ? size_default : page_size;
  if (page_token.empty()) return page;
  std::string decoded;
  if (!absl::WebSafeBase64Unescape(page_token, &decoded) || decoded.empty() ||
      decoded.front() != kTokenVersion || !Registry::IsValidId(decoded.substr(1))) {
    return InvalidField("page_token", "is not one that a list returned");
  }
  page.after = decoded.substr(1);
  return page;
}

std::string PageToken(std::string_view last_id) {
  return absl::WebSafeBase64Escape(
      absl::StrCat(std::string(1, kTokenVersion), std::string(last_id)));
}

}  // namespace spillway

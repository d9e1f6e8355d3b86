#pragma once

#include <cstdint>
#include <string>

#include "engine/caller.h"
#include "engine/registry.h"
#include "google/protobuf/repeated_field.h"
#include "services/convert/names.h"

namespace spillway {

// Most bytes of a list's page. A message has room for more, for the last item and other fields.
inline constexpr int64_t kPageBytesMax = int64_t{2} << 20;

// Adds convert(item) for the items of the page, as many as fit into a message. Returns the token of
// the next page; empty if there is none.
template <typename T, typename Out, typename Convert>
std::string FillPage(const Page<T>& page, google::protobuf::RepeatedPtrField<Out>& list,
                     const Convert& convert) {
  int64_t bytes = 0;
  for (size_t i = 0; i < page.items.size(); ++i) {
    Out& out = *list.Add();
    out = convert(*page.items[i]);
    bytes += static_cast<int64_t>(out.ByteSizeLong());
    const bool last = i + 1 == page.items.size();
    if (last ? page.more : bytes > kPageBytesMax) return PageToken(ClientIdOf(page.items[i]->id));
  }
  return "";
}

}  // namespace spillway

#pragma once

#include <string_view>

namespace spillway {

// The status page, from the files in daemon/http/page.
extern const std::string_view kPageHtml;
extern const std::string_view kPageCss;
extern const std::string_view kPageJs;
extern const std::string_view kPageSvg;

}  // namespace spillway

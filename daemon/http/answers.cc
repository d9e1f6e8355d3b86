#include "daemon/http/answers.h"

#include <arpa/inet.h>

#include <string>
#include <utility>

#include "daemon/http/page.h"
#include "daemon/http/prometheus_text.h"
#include "daemon/http/status_json.h"
#include "nlohmann/json.hpp"

namespace spillway {
namespace {

constexpr char kJson[] = "application/json";

std::string_view PathOf(std::string_view target) { return target.substr(0, target.find('?')); }

// Whether a Host header names this machine, as it must in requests to a loopback address. With DNS
// rebinding, a page of another site sends the site's name.
bool NamesThisMachine(std::string_view header) {
  std::string host(header);
  if (const size_t colon = host.rfind(':');
      colon != std::string::npos && host.find(']', colon) == std::string::npos) {
    host = host.substr(0, colon);
  }
  if (host.empty() || host == "localhost" || host == "[::1]") return true;
  in_addr address = {};
  return inet_pton(AF_INET, host.c_str(), &address) == 1 && ntohl(address.s_addr) >> 24 == 127;
}

HttpAnswer Readiness(const std::string& not_ready) {
  nlohmann::json readiness = {{"ready", not_ready.empty()}};
  if (!not_ready.empty()) readiness["reason"] = not_ready;
  return {not_ready.empty() ? 200 : 503, kJson, readiness.dump() + "\n"};
}

}  // namespace

bool Answers::TakesLong(std::string_view target) {
  const std::string_view path = PathOf(target);
  return path == "/metrics" || path == "/status.json";
}

HttpAnswer Answers::To(const HttpRequest& request) const {
  if (request.method != "GET" && request.method != "HEAD") {
    return {.status = 405, .body = "This only answers GET.\n"};
  }
  if (!allow_remote_ && !NamesThisMachine(request.host)) {
    return {.status = 421, .body = "The request is for another host.\n"};
  }
  const std::string_view path = PathOf(request.target);
  if (path == "/") return {200, "text/html; charset=utf-8", std::string(kPageHtml)};
  if (path == "/status.css") return {200, "text/css; charset=utf-8", std::string(kPageCss)};
  if (path == "/status.js") return {200, "text/javascript; charset=utf-8", std::string(kPageJs)};
  if (path == "/status.svg") return {200, "image/svg+xml", std::string(kPageSvg)};
  if (path == "/status.json") return {200, kJson, StatusJson(metrics_)};
  if (path == "/metrics") {
    return {200, "text/plain; version=0.0.4; charset=utf-8", PrometheusText(metrics_.Collect())};
  }
  if (path == "/healthz") return {200, kJson, "{\"serving\":true}\n"};
  if (path == "/readyz") return Readiness(metrics_.sources().not_ready());
  return {.status = 404, .body = "There is no such page.\n"};
}

}  // namespace spillway

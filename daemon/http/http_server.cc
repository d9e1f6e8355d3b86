#include "daemon/http/http_server.h"

#include <arpa/inet.h>
#include <httplib.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "daemon/http/page.h"
#include "daemon/metrics/status_json.h"
#include "nlohmann/json.hpp"
#include "prometheus/text_serializer.h"

namespace spillway {
namespace {

using Request = httplib::Request;
using Response = httplib::Response;

constexpr size_t kThreadCount = 4;
constexpr time_t kTimeoutSeconds = 5;
// Browsers open connections before they need them. Each of those occupies a thread for this long.
constexpr time_t kFirstByteSeconds = 2;

constexpr char kJson[] = "application/json";
constexpr char kText[] = "text/plain; charset=utf-8";

const httplib::Headers& SafeHeaders() {
  static const auto* const headers = new httplib::Headers{
      {"Content-Security-Policy",
       "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
      {"X-Content-Type-Options", "nosniff"},
      {"Referrer-Policy", "no-referrer"},
      {"Cross-Origin-Resource-Policy", "same-origin"},
      {"Cache-Control", "no-store"}};
  return *headers;
}

// Whether a Host header names this machine, as it must in requests to a loopback address. With DNS
// rebinding, a page of another site sends the site's name.
bool NamesThisMachine(const std::string& header) {
  std::string host = header;
  if (const size_t colon = host.rfind(':');
      colon != std::string::npos && host.find(']', colon) == std::string::npos) {
    host = host.substr(0, colon);
  }
  if (host.empty() || host == "localhost" || host == "[::1]") return true;
  in_addr address = {};
  return inet_pton(AF_INET, host.c_str(), &address) == 1 && ntohl(address.s_addr) >> 24 == 127;
}

// Uses a content provider, because the library compresses content that it gets at once. With brotli
// a scrape would take 40 ms of a core.
void Answer(Response& response, int status, std::string body, const char* type) {
  response.status = status;
  const size_t size = body.size();
  response.set_content_provider(
      size, type, [body = std::move(body)](size_t offset, size_t length, httplib::DataSink& sink) {
        return sink.write(body.data() + offset, length);
      });
}

std::string Readiness(const std::string& not_ready) {
  nlohmann::json readiness = {{"ready", not_ready.empty()}};
  if (!not_ready.empty()) readiness["reason"] = not_ready;
  return readiness.dump() + "\n";
}

void Route(httplib::Server& server, bool allow_remote, const Metrics& metrics) {
  server.set_pre_routing_handler([allow_remote](const Request& request, Response& response) {
    if (request.method != "GET" && request.method != "HEAD") {
      response.set_header("Allow", "GET, HEAD");
      Answer(response, 405, "This only answers GET.\n", kText);
      return httplib::Server::HandlerResponse::Handled;
    }
    if (!allow_remote && !NamesThisMachine(request.get_header_value("Host"))) {
      Answer(response, 421, "The request is for another host.\n", kText);
      return httplib::Server::HandlerResponse::Handled;
    }
    return httplib::Server::HandlerResponse::Unhandled;
  });
  const auto page = [&server](const char* path, std::string_view body, const char* type) {
    server.Get(path, [body, type](const Request&, Response& response) {
      Answer(response, 200, std::string(body), type);
    });
  };
  page("/", kPageHtml, "text/html; charset=utf-8");
  page("/status.css", kPageCss, "text/css; charset=utf-8");
  page("/status.js", kPageJs, "text/javascript; charset=utf-8");
  page("/status.svg", kPageSvg, "image/svg+xml");
  server.Get("/status.json", [&metrics](const Request&, Response& response) {
    Answer(response, 200, StatusJson(metrics), kJson);
  });
  server.Get("/metrics", [&metrics](const Request&, Response& response) {
    Answer(response, 200, prometheus::TextSerializer().Serialize(metrics.Collect()),
           "text/plain; version=0.0.4; charset=utf-8");
  });
  server.Get("/healthz", [](const Request&, Response& response) {
    Answer(response, 200, "{\"serving\":true}\n", kJson);
  });
  server.Get("/readyz", [&metrics](const Request&, Response& response) {
    const std::string not_ready = metrics.sources().not_ready();
    Answer(response, not_ready.empty() ? 200 : 503, Readiness(not_ready), kJson);
  });
}

}  // namespace

struct HttpServer::Impl {
  httplib::Server server;
  std::string address;
  std::thread thread;
};

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address,
                                                              bool allow_remote,
                                                              const Metrics& metrics) {
  auto impl = std::make_unique<Impl>();
  httplib::Server& server = impl->server;
  server.new_task_queue = [] { return new httplib::ThreadPool(kThreadCount); };
  server.set_keep_alive_max_count(1);
  server.set_keep_alive_timeout(kFirstByteSeconds);
  server.set_read_timeout(kTimeoutSeconds);
  server.set_write_timeout(kTimeoutSeconds);
  server.set_default_headers(SafeHeaders());
  // Without SO_REUSEPORT, which the library sets by default: it would let two daemons share an
  // address.
  server.set_socket_options([](int socket) {
    const int on = 1;
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  });
  Route(server, allow_remote, metrics);

  const size_t colon = address.rfind(':');
  const std::string host = address.substr(0, colon);
  std::string bare = host;
  if (bare.starts_with('[') && bare.ends_with(']')) bare = bare.substr(1, bare.size() - 2);
  int port = 0;
  if (!absl::SimpleAtoi(address.substr(colon + 1), &port)) {
    return absl::InvalidArgumentError(absl::StrCat("\"", address, "\" is not host:port"));
  }
  errno = 0;
  if (port == 0) {
    port = server.bind_to_any_port(bare);
  } else if (!server.bind_to_port(bare, port)) {
    port = -1;
  }
  if (port < 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", address, ": ",
                     errno == 0 ? "the address is not available" : std::strerror(errno)));
  }
  impl->address = absl::StrCat(host, ":", port);
  impl->thread = std::thread([&server] { server.listen_after_bind(); });
  // The library cannot be stopped before it runs.
  while (!server.is_running()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

HttpServer::~HttpServer() {
  impl_->server.stop();
  impl_->thread.join();
}

const std::string& HttpServer::address() const { return impl_->address; }

}  // namespace spillway

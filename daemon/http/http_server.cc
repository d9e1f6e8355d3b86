#include "daemon/http/http_server.h"

#include <sys/socket.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <deque>
#include <limits>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "daemon/http/answers.h"

namespace spillway {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using asio::ip::tcp;
using Error = boost::system::error_code;

// Those that are open at the same time.
constexpr size_t kConnectionCountMax = 64;
// Of the request line and all headers together.
constexpr uint32_t kHeaderBytesMax = 8192;
// From the accept to the end of the headers, however many bytes come meanwhile.
constexpr auto kRequestTimeMax = std::chrono::seconds(5);
// Until the client has taken the whole answer.
constexpr auto kAnswerTimeMax = std::chrono::seconds(5);
// After the answer, what the client still sends is read and dropped: closing a socket with unread
// bytes resets the connection, and the client may lose the answer.
constexpr auto kDrainTimeMax = std::chrono::seconds(1);
constexpr size_t kDrainBytesMax = 256 << 10;
// Pause after a failed accept, for example for want of descriptors.
constexpr auto kRetryTime = std::chrono::milliseconds(50);

std::string_view View(beast::string_view text) { return {text.data(), text.size()}; }

// One connection: reads the headers of one request, answers it, and closes. The body of a request
// is not read, and a Range header is ignored: an answer is always whole. Used by the thread of the
// socket's executor alone. Keeps itself alive until it is closed.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  // The answers, and the thread for those that take long, must outlive it.
  Connection(tcp::socket socket, const Answers& answers, asio::thread_pool& long_answers)
      : stream_(std::move(socket)),
        buffer_(kHeaderBytesMax),
        answers_(answers),
        long_answers_(long_answers) {
    parser_.header_limit(kHeaderBytesMax);
    // Bodies are not read, whatever their size. Boost 1.74 refuses any body if there is no limit.
    parser_.body_limit(std::numeric_limits<uint64_t>::max());
  }

  void Start() {
    // The time limits the whole read: bytes that arrive do not extend it.
    stream_.expires_after(kRequestTimeMax);
    http::async_read_header(stream_, buffer_, parser_,
                            [self = shared_from_this()](Error error, size_t) {
                              if (self->is_open()) self->Received(error);
                            });
  }

  // Drops the connection, whatever it is doing. A second call does nothing.
  void Close() { stream_.close(); }
  bool is_open() const { return stream_.socket().is_open(); }

 private:
  void Received(Error error) {
    if (error == http::error::header_limit || error == http::error::buffer_overflow) {
      Send({.status = 431, .body = "The headers have more than 8192 bytes.\n"});
    } else if (error == http::error::end_of_stream || error == http::error::partial_message) {
      Close();  // the client has gone
    } else if (error.category() == make_error_code(http::error::bad_value).category()) {
      Send({.status = 400, .body = "The request is malformed.\n"});
    } else if (error) {
      Close();
    } else if (parser_.get().count(http::field::host) > 1) {
      Send({.status = 400, .body = "The request has two Host headers.\n"});
    } else {
      Compute();
    }
  }

  void Compute() {
    if (!Answers::TakesLong(View(parser_.get().target()))) return Send(Answer());
    stream_.expires_never();
    asio::post(long_answers_, [self = shared_from_this()] {
      asio::post(self->stream_.get_executor(), [self, answer = self->Answer()]() mutable {
        if (self->is_open()) self->Send(std::move(answer));
      });
    });
  }

  HttpAnswer Answer() const {
    const auto& request = parser_.get();
    return answers_.To({.method = View(request.method_string()),
                        .target = View(request.target()),
                        .host = View(request[http::field::host])});
  }

  void Send(HttpAnswer answer) {
    response_.result(static_cast<unsigned>(answer.status));
    response_.keep_alive(false);
    response_.set(http::field::content_type, answer.type);
    response_.set(http::field::accept_ranges, "none");
    response_.set(
        "Content-Security-Policy",
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'");
    response_.set("X-Content-Type-Options", "nosniff");
    response_.set("Referrer-Policy", "no-referrer");
    response_.set("Cross-Origin-Resource-Policy", "same-origin");
    response_.set(http::field::cache_control, "no-store");
    if (answer.status == 405) response_.set(http::field::allow, "GET, HEAD");
    response_.body() = std::move(answer.body);
    response_.prepare_payload();
    writer_.emplace(response_);
    stream_.expires_after(kAnswerTimeMax);
    auto drain = [self = shared_from_this()](Error error, size_t) {
      if (error) return self->Close();
      self->stream_.socket().shutdown(tcp::socket::shutdown_send, error);
      self->stream_.expires_after(kDrainTimeMax);
      self->Drain();
    };
    if (parser_.is_header_done() && parser_.get().method() == http::verb::head) {
      writer_->split(true);
      http::async_write_header(stream_, *writer_, std::move(drain));
    } else {
      http::async_write(stream_, *writer_, std::move(drain));
    }
  }

  void Drain() {
    buffer_.clear();
    stream_.async_read_some(buffer_.prepare(kHeaderBytesMax),
                            [self = shared_from_this()](Error error, size_t byte_count) {
                              self->drained_bytes_ += byte_count;
                              if (error || self->drained_bytes_ > kDrainBytesMax) {
                                return self->Close();
                              }
                              self->Drain();
                            });
  }

  beast::tcp_stream stream_;
  beast::flat_buffer buffer_;
  http::request_parser<http::buffer_body> parser_;  // keeps no body
  http::response<http::string_body> response_;
  std::optional<http::response_serializer<http::string_body>> writer_;
  size_t drained_bytes_ = 0;
  const Answers& answers_;
  asio::thread_pool& long_answers_;
};

}  // namespace

struct HttpServer::Impl {
  Impl(std::vector<Descriptor> sockets, bool allow_remote, const Metrics& metrics)
      : answers(allow_remote, metrics) {
    for (Descriptor& socket : sockets) {
      sockaddr address = {};
      socklen_t size = sizeof(address);
      getsockname(socket.get(), &address, &size);
      listeners.emplace_back(io).assign(address.sa_family == AF_INET6 ? tcp::v6() : tcp::v4(),
                                        socket.Release());
    }
    for (tcp::acceptor& listener : listeners) Accept(listener);
    thread = std::thread([this] { io.run(); });
  }
  ~Impl() {
    io.stop();
    thread.join();
    long_answers.join();
  }

  void Accept(tcp::acceptor& listener) {
    listener.async_accept([this, &listener](Error error, tcp::socket socket) {
      if (error) return AcceptLater(listener);
      Admit(std::move(socket));
      Accept(listener);
    });
  }

  void AcceptLater(tcp::acceptor& listener) {
    auto timer = std::make_shared<asio::steady_timer>(io, kRetryTime);
    timer->async_wait([this, &listener, timer](Error) { Accept(listener); });
  }

  void Admit(tcp::socket socket) {
    std::erase_if(connections, [](const std::weak_ptr<Connection>& one) {
      const std::shared_ptr<Connection> connection = one.lock();
      return connection == nullptr || !connection->is_open();
    });
    if (connections.size() == kConnectionCountMax) {
      connections.front().lock()->Close();
      connections.pop_front();
    }
    const auto connection = std::make_shared<Connection>(std::move(socket), answers, long_answers);
    connections.push_back(connection);
    connection->Start();
  }

  const Answers answers;
  // The thread of answers that take long, so that probes do not wait for them.
  asio::thread_pool long_answers{1};
  asio::io_context io{1};
  std::deque<tcp::acceptor> listeners;
  std::deque<std::weak_ptr<Connection>> connections;  // oldest first
  std::thread thread;
};

HttpServer::HttpServer(std::vector<Descriptor> listeners, bool allow_remote, const Metrics& metrics)
    : impl_(std::make_unique<Impl>(std::move(listeners), allow_remote, metrics)) {}

HttpServer::~HttpServer() = default;

}  // namespace spillway

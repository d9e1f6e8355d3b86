#include "spillway/access.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/client_interceptor.h"
#include "host/base/regular_file.h"
#include "host/base/status_macros.h"
#include "spillway/client.h"

namespace spillway {
namespace {

constexpr char kTls[] = "tls:";

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

absl::StatusOr<std::string> Read(const std::string& path, const char* what) {
  constexpr int64_t kBytesMax = int64_t{4} << 20;
  if (path.empty()) return "";
  absl::StatusOr<RegularFile> file = ReadRegularFile(path, kBytesMax);
  if (file.ok()) return std::move(file->text);
  return absl::InvalidArgumentError(absl::StrCat("TLS: the ", what, ": ", file.status().message()));
}

bool SpeaksTls(const std::string& target, const Access& access) {
  if (absl::StartsWith(target, kTls)) return true;
  if (absl::StartsWith(target, "tcp:") || absl::StartsWith(target, "unix:") ||
      absl::StartsWith(target, "/")) {
    return false;
  }
  return !access.tls_ca.empty() || !access.tls_certificate.empty();
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> TlsCredentials(const Access& access) {
  if (access.tls_certificate.empty() != access.tls_key.empty()) {
    return absl::InvalidArgumentError(
        "TLS: a client's certificate and its key must both be set, and one of them is not");
  }
  grpc::SslCredentialsOptions options;
  ASSIGN_OR_RETURN(options.pem_root_certs, Read(access.tls_ca, "authorities"));
  ASSIGN_OR_RETURN(options.pem_cert_chain, Read(access.tls_certificate, "client's certificate"));
  ASSIGN_OR_RETURN(options.pem_private_key, Read(access.tls_key, "client's key"));
  return grpc::SslCredentials(options);
}

absl::Status CheckToken(const std::string& token) {
  const bool fits = std::all_of(token.begin(), token.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || std::strchr("-._~+/=", c) != nullptr;
  });
  // The message does not contain the token, which is a secret.
  return fits ? absl::OkStatus()
              : absl::InvalidArgumentError(
                    "the token has characters other than letters, digits and -._~+/=");
}

// Adds the token to every call. gRPC's own way, call credentials, works only with TLS.
class TokenSender final : public grpc::experimental::Interceptor {
 public:
  explicit TokenSender(const std::string& header) : header_(header) {}
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    using Point = grpc::experimental::InterceptionHookPoints;
    if (methods->QueryInterceptionHookPoint(Point::PRE_SEND_INITIAL_METADATA)) {
      methods->GetSendInitialMetadata()->emplace("authorization", header_);
    }
    methods->Proceed();
  }

 private:
  const std::string& header_;  // owned by the factory
};

class TokenSenders final : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  explicit TokenSenders(const std::string& token) : header_(absl::StrCat("Bearer ", token)) {}
  grpc::experimental::Interceptor* CreateClientInterceptor(
      grpc::experimental::ClientRpcInfo*) override {
    return new TokenSender(header_);
  }

 private:
  const std::string header_;
};

}  // namespace

Access DefaultAccess() {
  return {Environment("SPILLWAY_TLS_CA"), Environment("SPILLWAY_TLS_CERT"),
          Environment("SPILLWAY_TLS_KEY"), Environment("SPILLWAY_TOKEN")};
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenChannel(const std::string& target,
                                                           const Access& access,
                                                           grpc::ChannelArguments arguments) {
  // A daemon on this host is not behind the user's web proxy.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // A daemon that restarts is usually back within seconds.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  // A connection that another channel opened may lead to a daemon that is gone.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // Clients retry calls themselves. If gRPC moves a stream to another connection, the stream may
  // lose its next message and then wait forever.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (SpeaksTls(target, access)) {
    ASSIGN_OR_RETURN(credentials, TlsCredentials(access));
  }
  const std::string address = NormalizeTarget(std::string(absl::StripPrefix(target, kTls)));
  if (access.token.empty()) return grpc::CreateCustomChannel(address, credentials, arguments);
  RETURN_IF_ERROR(CheckToken(access.token));
  std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>> senders;
  senders.push_back(std::make_unique<TokenSenders>(access.token));
  return grpc::experimental::CreateCustomChannelWithInterceptors(address, credentials, arguments,
                                                                 std::move(senders));
}

}  // namespace spillway

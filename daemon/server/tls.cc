#include "daemon/server/tls.h"

#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_credentials_options.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

constexpr unsigned kReadSeconds = 1;
constexpr int64_t kPemFileBytesMax = int64_t{4} << 20;
constexpr std::array<const char*, 3> kSettings = {"tls.certificate (--tls-certificate)",
                                                  "tls.key (--tls-key)",
                                                  "tls.client_ca (--tls-client-ca)"};

std::string FileOf(const Descriptor& held) { return absl::StrCat("/proc/self/fd/", held.get()); }

// OpenSSL's last error.
std::string OpenSslError() {
  const char* reason = nullptr;
  while (const unsigned long code = ERR_get_error()) reason = ERR_reason_error_string(code);
  return reason == nullptr ? "it cannot be read" : reason;
}

// Makes keys with a password an error: nobody can be asked for it.
int NoPassword(char*, int, int, void*) { return -1; }

absl::StatusOr<Descriptor> Hold(const std::string& text) {
  Descriptor file(memfd_create("spillway-tls", MFD_CLOEXEC));
  if (!file.valid() ||
      write(file.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    return absl::ResourceExhaustedError(absl::StrCat("memory for TLS: ", std::strerror(errno)));
  }
  return file;
}

}  // namespace

absl::StatusOr<Tls::Texts> Tls::Read(absl::Duration wait) {
  Texts texts;
  for (int part = 0; part < kPartCount; ++part) {
    if (files_[part].path().empty()) continue;
    absl::StatusOr<RegularFile> file = files_[part].Read(wait);
    if (!file.ok()) {
      return absl::Status(file.status().code(),
                          absl::StrCat(kSettings[part], ": ", file.status().message()));
    }
    texts[part] = std::move(file->text);
  }
  return texts;
}

absl::StatusOr<std::vector<Descriptor>> Tls::Check(const Texts& texts) const {
  const std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> context(SSL_CTX_new(TLS_server_method()),
                                                             SSL_CTX_free);
  if (context == nullptr) return absl::InternalError(absl::StrCat("OpenSSL: ", OpenSslError()));
  SSL_CTX_set_default_passwd_cb(context.get(), NoPassword);
  ERR_clear_error();
  const auto wrong = [this](Part part, const std::string& what) {
    return absl::InvalidArgumentError(
        absl::StrCat(kSettings[part], ": ", files_[part].path(), " ", what, ": ", OpenSslError()));
  };
  std::vector<Descriptor> files;
  for (const std::string& text : texts) {
    ASSIGN_OR_RETURN(Descriptor file, Hold(text));
    files.push_back(std::move(file));
  }
  if (SSL_CTX_use_certificate_chain_file(context.get(), FileOf(files[kCertificate]).c_str()) != 1) {
    return wrong(kCertificate, "holds no certificate in PEM");
  }
  // OpenSSL also compares the key with the certificate.
  if (SSL_CTX_use_PrivateKey_file(context.get(), FileOf(files[kKey]).c_str(), SSL_FILETYPE_PEM) !=
      1) {
    return wrong(kKey, absl::StrCat("holds no key in PEM, without a password, of the certificate ",
                                    files_[kCertificate].path()));
  }
  if (is_mutual() && SSL_CTX_load_verify_locations(context.get(), FileOf(files[kClientCa]).c_str(),
                                                   nullptr) != 1) {
    return wrong(kClientCa, "holds no certificates in PEM");
  }
  return files;
}

absl::Status Tls::Take(const Texts& texts) {
  ASSIGN_OR_RETURN(std::vector<Descriptor> files, Check(texts));
  for (int part = 0; part < kPartCount; ++part) {
    if (!held_[part].valid()) {
      held_[part] = std::move(files[part]);
      // dup3 is atomic: under this number gRPC finds either the whole old file or the whole new
      // one.
    } else if (dup3(files[part].get(), held_[part].get(), O_CLOEXEC) < 0) {
      return absl::ResourceExhaustedError(absl::StrCat("memory for TLS: ", std::strerror(errno)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Tls>> Tls::Open(const Config& config) {
  if (config.tls_certificate.empty()) return nullptr;
  std::unique_ptr<Tls> tls(new Tls({WatchedFile(config.tls_certificate, kPemFileBytesMax),
                                    WatchedFile(config.tls_key, kPemFileBytesMax),
                                    WatchedFile(config.tls_client_ca, kPemFileBytesMax)}));
  tls->seen_ = tls->Read(WatchedFile::kNeeded);
  RETURN_IF_ERROR(tls->seen_.status());
  RETURN_IF_ERROR(tls->Take(*tls->seen_));
  return tls;
}

std::shared_ptr<grpc::ServerCredentials> Tls::Credentials() const {
  // While the files that gRPC reads are wrong, it refuses all connections. So it does not read the
  // user's files, but copies that were checked.
  auto provider = std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
      FileOf(held_[kKey]), FileOf(held_[kCertificate]), is_mutual() ? FileOf(held_[kClientCa]) : "",
      kReadSeconds);
  grpc::experimental::TlsServerCredentialsOptions options(provider);
  options.watch_identity_key_cert_pairs();
  if (is_mutual()) options.watch_root_certs();
  options.set_cert_request_type(is_mutual()
                                    ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                                    : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
  return grpc::experimental::TlsServerCredentials(options);
}

absl::StatusOr<bool> Tls::Reload() {
  absl::StatusOr<Texts> read = Read(WatchedFile::kTurn);
  if (read == seen_) return false;
  seen_ = std::move(read);
  RETURN_IF_ERROR(seen_.status());
  RETURN_IF_ERROR(Take(*seen_));
  return true;
}

}  // namespace spillway

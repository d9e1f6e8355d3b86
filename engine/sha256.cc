#include "engine/sha256.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <cassert>

#include "absl/strings/escaping.h"

namespace spillway {

Sha256::Sha256() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
  [[maybe_unused]] const int made = EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr);
  assert(made == 1);
}

Sha256::~Sha256() = default;

void Sha256::Add(std::span<const std::byte> bytes) {
  EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size());
}

std::string Sha256::Finish() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest;
  unsigned int length = 0;
  EVP_DigestFinal_ex(context_.get(), digest.data(), &length);
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest.data()), length));
}

std::string Sha256::Of(std::span<const std::byte> bytes) {
  Sha256 digest;
  digest.Add(bytes);
  return digest.Finish();
}

std::string Sha256::Of(const std::string& text) {
  return Of(std::as_bytes(std::span(text.data(), text.size())));
}

bool IsDigest(std::string_view text, size_t digit_count) {
  return text.size() == digit_count && std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

}  // namespace spillway

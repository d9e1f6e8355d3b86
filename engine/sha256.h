#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

struct evp_md_ctx_st;

namespace spillway {

// A SHA-256 digest of bytes that come in pieces. Not thread-safe.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Add(std::span<const std::byte> bytes);
  // 64 lower-case hexadecimal digits, as sha256sum prints. Nothing may be added after it.
  std::string Finish();

  static std::string Of(std::span<const std::byte> bytes);
  static std::string Of(const std::string& text);

 private:
  const std::unique_ptr<evp_md_ctx_st, void (*)(evp_md_ctx_st*)> context_;
};

// Whether a text is digit_count lower-case hexadecimal digits: a digest, or the beginning of one.
bool IsDigest(std::string_view text, size_t digit_count);

}  // namespace spillway

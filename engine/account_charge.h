#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "engine/account.h"

namespace spillway {

// Owner of bytes that are charged to an account. Movable, not thread-safe.
class AccountCharge {
 public:
  AccountCharge() = default;
  explicit AccountCharge(std::shared_ptr<Account> account) : account_(std::move(account)) {}
  AccountCharge(AccountCharge&& other) noexcept
      : account_(std::move(other.account_)), bytes_(std::exchange(other.bytes_, 0)) {}
  AccountCharge& operator=(AccountCharge&& other) noexcept {
    std::swap(account_, other.account_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~AccountCharge() { Settle(0); }

  int64_t bytes() const { return bytes_; }
  // Charges `bytes` more. Errors as Account::Charge(), which leave the charge as it was. REQUIRES:
  // there is an account.
  absl::Status Add(int64_t bytes) {
    absl::Status status = account_->Charge(bytes);
    if (status.ok()) bytes_ += bytes;
    return status;
  }
  // Takes over the charge of `other`, which has the same account.
  void Absorb(AccountCharge&& other) { bytes_ += std::exchange(other.bytes_, 0); }
  // Sets the charge to `bytes` without a check of the quota.
  void Settle(int64_t bytes) {
    if (account_ != nullptr) account_->Settle(bytes - bytes_);
    bytes_ = bytes;
  }

 private:
  std::shared_ptr<Account> account_;
  int64_t bytes_ = 0;
};

}  // namespace spillway

#pragma once

#include <unistd.h>

#include <utility>

namespace spillway {

// Owner of a file descriptor. The destructor closes it.
class Descriptor {
 public:
  // fd: the descriptor to own; negative: none.
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  // The caller must close the returned descriptor.
  int Release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

}  // namespace spillway

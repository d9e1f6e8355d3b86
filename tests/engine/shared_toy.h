#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/engine/toy_device.h"

namespace spillway {

// A toy device that shares memory as a GPU does. It is host memory, so that tests can read it.
// Reads and writes are counted.
class SharedToy final : public ToyDevice {
 public:
  SharedToy(std::string name, std::string uuid) : ToyDevice(/*delayed=*/false) {
    named_ = {std::move(name), "shares memory", std::move(uuid), 1, "none"};
  }

  const DeviceInfo& info() const override { return named_; }
  absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> AllocateShared(std::string_view device,
                                                                     int64_t bytes) override {
    if (!named_.Is(device)) return Device::AllocateShared(device, bytes);
    return std::make_unique<Memory>(this, bytes);
  }

  // The stream of the exchange is synchronous: every request is done at once.
  absl::StatusOr<std::unique_ptr<DeviceExchange>> OpenExchange(int64_t bytes,
                                                               int64_t input_bytes) override {
    return std::make_unique<Exchange>(std::make_unique<Memory>(this, bytes), input_bytes);
  }

  // Allocations that are not freed yet.
  int64_t shared_count() const { return shared_count_; }
  int64_t read_count() const { return read_count_; }
  int64_t write_count() const { return write_count_; }

 private:
  class Memory final : public SharedDeviceMemory {
   public:
    Memory(SharedToy* toy, int64_t bytes)
        : toy_(toy), bytes_(static_cast<size_t>((bytes + kGranule - 1) / kGranule * kGranule)) {
      ++toy_->shared_count_;
    }
    ~Memory() override { --toy_->shared_count_; }
    const Device& device() const override { return *toy_; }
    std::span<std::byte> bytes() const override {
      return {const_cast<std::byte*>(bytes_.data()), bytes_.size()};
    }
    const std::string& handle() const override { return handle_; }
    absl::Status Read(const std::byte* from, int64_t stride, int64_t row_bytes, int64_t row_count,
                      std::byte* to) override {
      ++toy_->read_count_;
      for (int64_t row = 0; row < row_count; ++row) {
        std::memcpy(to + row * row_bytes, from + row * stride, static_cast<size_t>(row_bytes));
      }
      return absl::OkStatus();
    }
    absl::Status Write(std::byte* to, const std::byte* from, int64_t bytes) override {
      ++toy_->write_count_;
      std::memcpy(to, from, static_cast<size_t>(bytes));
      return absl::OkStatus();
    }

   private:
    SharedToy* const toy_;
    std::vector<std::byte> bytes_;
    const std::string handle_ = std::string(64, 'h');
  };

  class Exchange final : public DeviceExchange {
   public:
    Exchange(std::unique_ptr<Memory> shared, int64_t input_bytes)
        : shared_(std::move(shared)), inputs_(static_cast<size_t>(input_bytes)) {}
    const SharedDeviceMemory& shared() const override { return *shared_; }
    void* stream() const override { return const_cast<Exchange*>(this); }
    std::byte* inputs() const override { return const_cast<std::byte*>(inputs_.data()); }
    absl::Status TakeInputs(int64_t bytes) override {
      std::memcpy(inputs_.data(), shared_->bytes().data(), static_cast<size_t>(bytes));
      return absl::OkStatus();
    }
    absl::Status Await() override { return absl::OkStatus(); }

   private:
    const std::unique_ptr<Memory> shared_;
    std::vector<std::byte> inputs_;
  };

  DeviceInfo named_;
  std::atomic<int64_t> shared_count_ = 0, read_count_ = 0, write_count_ = 0;
};

}  // namespace spillway

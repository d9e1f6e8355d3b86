#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "engine/account_charge.h"
#include "engine/audit_table.h"
#include "engine/caller.h"
#include "engine/work_counters.h"
#include "host/device/device.h"
#include "host/memory/memory_budget.h"
#include "host/memory/model_record.h"
#include "host/memory/page_pool.h"

namespace spillway {

// A model from which sequences are created. Spec and policy never change; the device's part is set
// when the hash weights are there. Thread-safe.
class Model {
 public:
  Model(std::string id, const ModelSpec& spec, const Policy& policy, Arena* arena,
        absl::Time create_time)
      : id(std::move(id)),
        name("models/" + std::string(ClientIdOf(this->id))),
        spec(spec),
        policy(policy),
        create_time(create_time),
        row_pool(arena, kPageTokenCount * spec.row_bytes()),
        audits(spec) {}

  const std::string id;    // the engine's, with its namespace
  const std::string name;  // "models/{id}" with the client's id
  const ModelSpec spec;
  const Policy policy;
  const absl::Time create_time;

  // Memory of the model without weights; set before the model is in the registry.
  MemoryReservation table_reservation;
  // The same and the weights, in the account of its namespace. Changes with SetDevice() only.
  AccountCharge charge;

  // Pages for the rows of all its sequences.
  PagePool row_pool;
  WorkCounters work;
  AuditTable audits;
  // Sequences that hold memory: those in the registry, and deleted ones whose operations have not
  // ended.
  std::atomic<int64_t> sequence_count{0};
  // The record that outlives the process; null without a store. The registry lists it.
  std::unique_ptr<ModelRecord> record;

  bool ready() const { return device_.load(std::memory_order_acquire) != nullptr; }
  // nullptr until ready.
  DeviceModel* device() const { return device_.load(std::memory_order_acquire); }

  // SHA-256 digest of the uploaded hash weights; empty if the model needs none. REQUIRES: ready().
  const std::string& weights_sha256() const { return weights_sha256_; }

  // Makes the model ready; called once. reservation: the memory that `device` holds.
  void SetDevice(std::unique_ptr<DeviceModel> device, MemoryReservation reservation,
                 std::string weights_sha256) {
    weights_sha256_ = std::move(weights_sha256);
    owned_device_ = std::move(device);
    reservation_ = std::move(reservation);
    device_.store(owned_device_.get(), std::memory_order_release);
  }

  // Held during an upload, so that there is one at a time.
  std::atomic_flag uploading = ATOMIC_FLAG_INIT;

 private:
  MemoryReservation reservation_;
  std::string weights_sha256_;
  std::unique_ptr<DeviceModel> owned_device_;
  std::atomic<DeviceModel*> device_{nullptr};
};

}  // namespace spillway

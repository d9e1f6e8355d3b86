#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/engine.h"
#include "services/config/config.h"

namespace spillway {

// The value of EngineOptions::unnamed_grace that the settings ask for.
absl::Duration UnnamedGraceOf(const Config& config);

// An engine and all that it needs: memory, device, store, audit. The daemon has one, and so has a
// program with an embedded engine.
class Home {
 public:
  // limit_name: the name of the memory limit in errors. device_lost: see EngineOptions; it may be
  // called before Open() returns. Errors as OpenDevice, Store::Open and Arena::Create.
  static absl::StatusOr<std::unique_ptr<Home>> Open(const Config& config,
                                                    const std::string& limit_name,
                                                    DeviceWatch::OnLost device_lost = nullptr);
  // REQUIRES: no operation is running.
  ~Home();
  Home(const Home&) = delete;
  Home& operator=(const Home&) = delete;

  Engine& engine() { return *engine_; }
  const Device& device() const { return *device_; }

 private:
  Home(const Config& config, const std::string& limit_name);
  // Restores the models and sequences in the store, and logs them.
  absl::Status Restore();

  MemoryBudget budget_;
  std::unique_ptr<Store> store_;  // null: rows end with the process
  // Must outlive the arena, which registers its extents with it until it is destroyed.
  std::unique_ptr<Device> device_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Auditor> auditor_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace spillway

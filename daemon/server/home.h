#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/config/config.h"
#include "daemon/engine/engine.h"

namespace spillway {

// EngineOptions::unnamed_grace as the settings have it.
absl::Duration UnnamedGraceOf(const Config& config);

// An engine and what it stands on: memory, device, audit. The daemon has one,
// and so has a program that runs the engine in its own process.
class Home {
 public:
  // limit_name: what a refusal for want of memory calls the limit. device_lost: see
  // EngineOptions; it may be called before this returns. Errors as OpenDevice and Arena::Create.
  static absl::StatusOr<std::unique_ptr<Home>> Open(const Config& config,
                                                    const std::string& limit_name,
                                                    DeviceWatch::OnLost device_lost = nullptr);
  // REQUIRES: nothing is running.
  ~Home();
  Home(const Home&) = delete;
  Home& operator=(const Home&) = delete;

  Engine& engine() { return *engine_; }
  const Device& device() const { return *device_; }

 private:
  Home(const Config& config, const std::string& limit_name);
  // Goes on with what the store has, and logs it.
  absl::Status Restore();

  MemoryBudget budget_;
  std::unique_ptr<Store> store_;  // or null
  // Before the arena, which registers its extents with it until it goes.
  std::unique_ptr<Device> device_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Auditor> auditor_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace spillway

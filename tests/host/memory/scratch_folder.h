#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

namespace spillway {

// A new folder in tmpfs, which is removed with this object.
class ScratchFolder {
 public:
  ScratchFolder() {
    std::string name = "/dev/shm/spillway-test-XXXXXX";
    path_ = mkdtemp(name.data());
  }
  ~ScratchFolder() { std::filesystem::remove_all(path_); }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace spillway

#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace spillway {

// The socket at which a daemon listens, and where its clients look for it, if nobody names one. Its
// folder is the user's own, where no other user can make files:
//
//   $XDG_RUNTIME_DIR/spillway  if the variable is an absolute path;
//   /run/spillway              for root, as for the system's service;
//   /run/user/UID/spillway     if there is a /run/user/UID, as for a cron job of this user;
//   $HOME/.spillway            otherwise.
//
// clients/python/spillway_kv/target.py has the same rules.
inline std::string DefaultSocketPath() {
  constexpr char kName[] = "/spillway/spillwayd.sock";
  const char* const runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime != nullptr && *runtime == '/') return std::string(runtime) + kName;
  if (geteuid() == 0) return std::string("/run") + kName;
  const std::string user = "/run/user/" + std::to_string(geteuid());
  const char* const home = std::getenv("HOME");
  struct stat info {};
  const bool found =
      stat(user.c_str(), &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == geteuid();
  if (found || home == nullptr || *home != '/') return user + kName;
  return std::string(home) + "/.spillway/spillwayd.sock";
}

}  // namespace spillway

#include "daemon/server/network_server.h"

#include <filesystem>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "services/config/config.h"
#include "tests/engine/engine_fixture.h"

namespace spillway {
namespace {

class ServerTest : public EngineTest {
 protected:
  ServerTest() {
    std::string folder = std::filesystem::temp_directory_path() / "server-XXXXXX";
    EXPECT_NE(mkdtemp(folder.data()), nullptr);
    folder_ = folder;
  }
  ~ServerTest() override { std::filesystem::remove_all(folder_); }

  Config Listening() const {
    Config config;
    config.listen = absl::StrCat("unix:", (folder_ / "socket").string());
    config.snapshot_folder = folder_ / "snapshots";
    config.memory_limit_bytes = budget.limit_bytes();
    return config;
  }

 private:
  std::filesystem::path folder_;
};

// The thread that looks for expired sequences also reports whether the server is ready, for which
// it counts connections. Without a pause, it does so while the server is destroyed.
TEST_F(ServerTest, GoesWhileItLooksForExpiredSequences) {
  const Config config = Listening();
  for (int i = 0; i < 300; ++i) {
    absl::StatusOr<std::unique_ptr<NetworkServer>> server =
        NetworkServer::Start(config, *engine, {}, absl::ZeroDuration());
    ASSERT_TRUE(server.ok()) << server.status();
    (*server)->BeginDrain(absl::ZeroDuration());
    (*server)->Stop(absl::ZeroDuration());
  }
}

}  // namespace
}  // namespace spillway

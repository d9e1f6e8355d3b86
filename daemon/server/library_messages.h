#pragma once

namespace spillway {

// Has gRPC's and libprotobuf's messages logged as events "library", a few lines a
// second: a client can provoke them, and by themselves they go to standard error
// at any log level. REQUIRES: once, after SetUpQueuedLogging, before threads start.
void LogLibraryMessages();

// Says how many messages of the libraries were left out, and begins anew. For a timer.
void FlushLibraryMessages();

}  // namespace spillway

#pragma once

namespace spillway {

// Logs messages of gRPC and libprotobuf as events "library", a few lines per second. By default
// they go to standard error at any log level, and clients can cause any number of them. REQUIRES:
// called once, after SetUpQueuedLogging, before threads start.
void LogLibraryMessages();

// Logs how many messages of the libraries were suppressed since the last call. For a timer.
void FlushLibraryMessages();

}  // namespace spillway

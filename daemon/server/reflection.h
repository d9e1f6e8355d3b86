#pragma once

namespace spillway {

// Lets gRPC servers that are built afterwards describe the API to tools such as
// grpcurl (grpc.reflection.v1alpha). REQUIRES: once, before threads start.
void EnableReflection();

}  // namespace spillway

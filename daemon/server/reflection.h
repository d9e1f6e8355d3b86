#pragma once

namespace spillway {

// gRPC servers that are built after this call describe the API to tools such as grpcurl
// (grpc.reflection.v1alpha). REQUIRES: called once, before threads start.
void EnableReflection();

}  // namespace spillway

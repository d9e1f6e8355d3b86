#include "daemon/server/reflection.h"

#include <cstddef>
#include <string>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/descriptor.pb.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"

namespace spillway {

// The API's files as protoc wrote them: a serialised FileDescriptorSet.
extern const unsigned char kDescriptors[];
extern const size_t kDescriptorsSize;

void EnableReflection() {
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  google::protobuf::FileDescriptorSet files;
  if (!files.ParseFromArray(kDescriptors, static_cast<int>(kDescriptorsSize))) return;
  // Generated code registers its descriptors itself, but lite code does not. This protobuf function
  // is meant for generated code only. It keeps the pointers, so the bytes are never freed.
  for (const google::protobuf::FileDescriptorProto& file : files.file()) {
    const auto* const bytes = new std::string(file.SerializeAsString());
    google::protobuf::DescriptorPool::InternalAddGeneratedFile(bytes->data(),
                                                               static_cast<int>(bytes->size()));
  }
}

}  // namespace spillway

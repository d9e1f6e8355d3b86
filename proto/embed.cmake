# cmake -DFROM=file -DTO=file.cc -P embed.cmake: the bytes of a file as
# spillway::kDescriptors.
file(READ ${FROM} hex HEX)
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
file(WRITE ${TO} "#include <cstddef>
namespace spillway {
extern const unsigned char kDescriptors[];
extern const size_t kDescriptorsSize;
const unsigned char kDescriptors[] = {${bytes}};
const size_t kDescriptorsSize = sizeof(kDescriptors);
}  // namespace spillway
")

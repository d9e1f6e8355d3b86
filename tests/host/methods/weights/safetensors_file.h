#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace spillway {

// The bytes of a file with this header text and data, valid or not. header_bytes: the stated length
// of the header; -1: the true one.
inline std::vector<std::byte> RawSafeTensors(const std::string& header, const std::string& data,
                                             int64_t header_bytes = -1) {
  const uint64_t length = header_bytes < 0 ? header.size() : static_cast<uint64_t>(header_bytes);
  std::vector<std::byte> file(8 + header.size() + data.size());
  std::memcpy(file.data(), &length, 8);
  std::memcpy(file.data() + 8, header.data(), header.size());
  std::memcpy(file.data() + 8 + header.size(), data.data(), data.size());
  return file;
}

// Writes well-formed files of F32, I32 and I64 tensors.
class SafeTensorsWriter {
 public:
  void Add(const std::string& name, const std::vector<int64_t>& shape,
           const std::vector<float>& values) {
    Append("F32", name, shape, values.data(), sizeof(float) * values.size());
  }
  void AddIntegers(const std::string& name, const std::vector<int64_t>& shape,
                   const std::vector<int32_t>& values) {
    Append("I32", name, shape, values.data(), sizeof(int32_t) * values.size());
  }
  void AddIntegers(const std::string& name, const std::vector<int64_t>& shape,
                   const std::vector<int64_t>& values) {
    Append("I64", name, shape, values.data(), sizeof(int64_t) * values.size());
  }
  std::vector<std::byte> File() const { return RawSafeTensors("{" + header_ + "}", data_); }

 private:
  void Append(const std::string& dtype, const std::string& name, const std::vector<int64_t>& shape,
              const void* values, size_t bytes) {
    std::string list;
    for (const int64_t n : shape) list += (list.empty() ? "" : ",") + std::to_string(n);
    const size_t begin = data_.size();
    data_.append(static_cast<const char*>(values), bytes);
    header_ += (header_.empty() ? "" : ",") +
               ("\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[") + list +
               "],\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(data_.size()) +
               "]}";
  }

  std::string header_, data_;
};

}  // namespace spillway

#include "host/methods/weights/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "host/base/elements.h"
#include "host/base/finite.h"
#include "host/base/half.h"
#include "host/model/model_spec.h"

namespace spillway {
namespace {

using Json = nlohmann::json;

constexpr size_t kLengthBytes = 8;
// Enough for the largest model: 1024 layers of 13 tensors, about 120 bytes each.
constexpr uint64_t kHeaderBytesMax = uint64_t{4} << 20;
// A header has the form {tensor: {"shape": [...]}}; one that nests deeper is refused.
constexpr int kDepthMax = 3;
constexpr size_t kDimensionsMax = 8;
constexpr char kMetadata[] = "__metadata__";

absl::Status Malformed(std::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("safetensors file: ", std::string(what)));
}

absl::Status BadTensor(std::string_view name, std::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(
      "safetensors tensor \"", std::string(name.substr(0, 128)), "\" ", std::string(what)));
}

std::optional<DType> FloatType(std::string_view name) {
  if (name == "F32") return DType::kF32;
  if (name == "F16") return DType::kF16;
  if (name == "BF16") return DType::kBF16;
  return std::nullopt;
}

// Bytes of an element, if LoadIntegers reads this type; otherwise 0.
int IntegerBytes(std::string_view name) { return name == "I32" ? 4 : name == "I64" ? 8 : 0; }

// Number of elements of a shape; nullopt on overflow.
std::optional<int64_t> ElementCount(std::span<const int64_t> shape) {
  int64_t count = 1;
  for (const int64_t n : shape) {
    if (__builtin_mul_overflow(count, n, &count)) return std::nullopt;
  }
  return count;
}

// The integers of a JSON list; nullopt if it has anything else or more than count_max elements.
std::optional<std::vector<int64_t>> Integers(const Json& list, size_t count_max) {
  if (!list.is_array() || list.size() > count_max) return std::nullopt;
  std::vector<int64_t> values;
  for (const Json& n : list) {
    if (!n.is_number_unsigned() ||
        n.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return std::nullopt;
    }
    values.push_back(n.get<int64_t>());
  }
  return values;
}

absl::StatusOr<Json> ParseHeader(std::string_view text) {
  absl::flat_hash_set<std::string> names;
  std::optional<std::string> repeated;
  bool deep = false;
  // Values that the filter refuses are not built, so a hostile header takes little memory.
  const auto filter = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > kDepthMax) deep = true;
    if (event == Json::parse_event_t::key && depth == 1 &&
        !names.insert(value.get<std::string>()).second) {
      repeated = value.get<std::string>();
    }
    return !deep;
  };
  Json header = Json::parse(text.begin(), text.end(), filter, /*allow_exceptions=*/false);
  if (deep) return Malformed(absl::StrCat("the header nests deeper than ", kDepthMax));
  if (header.is_discarded() || !header.is_object()) {
    return Malformed("the header is not a JSON object");
  }
  if (repeated) return BadTensor(*repeated, "is named twice");
  return header;
}

float FromBFloat(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

std::vector<float> ToFloat(std::span<const std::byte> data, DType dtype) {
  std::vector<float> out(data.size() / DTypeBytes(dtype));
  if (dtype == DType::kF32) {
    if (!data.empty()) std::memcpy(out.data(), data.data(), data.size());
    return out;
  }
  for (size_t i = 0; i < out.size(); ++i) {
    uint16_t bits;
    std::memcpy(&bits, data.data() + 2 * i, sizeof(bits));
    out[i] = dtype == DType::kF16 ? HalfToFloat(bits) : FromBFloat(bits);
  }
  return out;
}

}  // namespace

absl::StatusOr<SafeTensors> SafeTensors::Parse(std::span<const std::byte> file) {
  uint64_t header_bytes = 0;
  if (file.size() < kLengthBytes) return Malformed("it is shorter than 8 bytes");
  std::memcpy(&header_bytes, file.data(), kLengthBytes);
  if (header_bytes > kHeaderBytesMax) {
    return Malformed(
        absl::StrCat("a header of ", header_bytes, " bytes is longer than ", kHeaderBytesMax));
  }
  if (header_bytes > file.size() - kLengthBytes) {
    return Malformed(absl::StrCat("a header of ", header_bytes, " bytes ends beyond its ",
                                  file.size(), " bytes"));
  }
  const absl::StatusOr<Json> header =
      ParseHeader({reinterpret_cast<const char*>(file.data()) + kLengthBytes, header_bytes});
  if (!header.ok()) return header.status();
  const auto data = file.subspan(kLengthBytes + header_bytes);

  SafeTensors parsed;
  struct Range {
    int64_t begin, end;
    std::string_view name;
  };
  std::vector<Range> ranges;
  for (const auto& [name, entry] : header->items()) {
    if (name == kMetadata) continue;
    if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") ||
        !entry.contains("data_offsets") || !entry["dtype"].is_string()) {
      return BadTensor(name, "lacks dtype, shape or data_offsets");
    }
    auto shape = Integers(entry["shape"], kDimensionsMax);
    if (!shape) return BadTensor(name, "has a shape that is not a list of at most 8 sizes");
    const auto offsets = Integers(entry["data_offsets"], 2);
    if (!offsets || offsets->size() != 2) {
      return BadTensor(name, "has data_offsets that are not two positions");
    }
    const auto [begin, end] = std::pair((*offsets)[0], (*offsets)[1]);
    if (begin > end || static_cast<uint64_t>(end) > data.size()) {
      return BadTensor(name, absl::StrCat("has data_offsets [", begin, ", ", end,
                                          "] outside of the ", data.size(), " bytes of data"));
    }
    const auto dtype_name = entry["dtype"].get<std::string>();
    const auto count = ElementCount(*shape);
    if (!count) return BadTensor(name, "has a shape that overflows");
    const auto dtype = FloatType(dtype_name);
    const int64_t bytes = dtype ? DTypeBytes(*dtype) : IntegerBytes(dtype_name);
    if (bytes > 0 && ((end - begin) % bytes != 0 || (end - begin) / bytes != *count)) {
      return BadTensor(name, absl::StrCat("has ", end - begin, " bytes for ", *count,
                                          " elements of ", dtype_name));
    }
    parsed.tensors_.try_emplace(
        name, Tensor{dtype_name, *std::move(shape), data.subspan(begin, end - begin)});
    ranges.push_back({begin, end, name});
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  int64_t position = 0;
  for (const Range& range : ranges) {
    if (range.begin != position) {
      return BadTensor(range.name, absl::StrCat("starts at ", range.begin, " where ", position,
                                                " is the end of the one before"));
    }
    position = range.end;
  }
  if (static_cast<uint64_t>(position) != data.size()) {
    return Malformed(
        absl::StrCat("its tensors end at ", position, " of ", data.size(), " bytes of data"));
  }
  return parsed;
}

bool SafeTensors::Contains(std::string_view name) const {
  return tensors_.contains(std::string(name));
}

absl::StatusOr<const SafeTensors::Tensor*> SafeTensors::Find(std::string_view name,
                                                             std::span<const int64_t> shape) const {
  const auto it = tensors_.find(std::string(name));
  if (it == tensors_.end()) return BadTensor(name, "is missing");
  const Tensor& tensor = it->second;
  if (!std::equal(shape.begin(), shape.end(), tensor.shape.begin(), tensor.shape.end())) {
    return BadTensor(name, absl::StrCat("has shape [", absl::StrJoin(tensor.shape, ", "),
                                        "], not [", absl::StrJoin(shape, ", "), "]"));
  }
  return &tensor;
}

absl::StatusOr<std::vector<int64_t>> SafeTensors::LoadIntegers(
    std::string_view name, std::span<const int64_t> shape) const {
  const absl::StatusOr<const Tensor*> found = Find(name, shape);
  if (!found.ok()) return found.status();
  const Tensor& tensor = **found;
  const size_t bytes = IntegerBytes(tensor.dtype);
  if (bytes == 0) {
    return BadTensor(name, absl::StrCat("has dtype ", tensor.dtype, ", not I32 or I64"));
  }
  std::vector<int64_t> values(tensor.data.size() / bytes);
  for (size_t i = 0; i < values.size(); ++i) {
    if (bytes == sizeof(int64_t)) {
      std::memcpy(&values[i], tensor.data.data() + i * bytes, bytes);
    } else {
      int32_t value;
      std::memcpy(&value, tensor.data.data() + i * bytes, bytes);
      values[i] = value;
    }
  }
  return values;
}

absl::StatusOr<std::vector<float>> SafeTensors::Load(std::string_view name,
                                                     std::span<const int64_t> shape) const {
  const absl::StatusOr<const Tensor*> found = Find(name, shape);
  if (!found.ok()) return found.status();
  const Tensor& tensor = **found;
  const auto dtype = FloatType(tensor.dtype);
  if (!dtype) {
    return BadTensor(name, absl::StrCat("has dtype ", tensor.dtype, ", not F32, F16 or BF16"));
  }
  if (const auto bad = FindNonFinite(tensor.data, *dtype)) {
    return BadTensor(name, absl::StrCat("has an infinity or NaN at element ", *bad));
  }
  return ToFloat(tensor.data, *dtype);
}

}  // namespace spillway

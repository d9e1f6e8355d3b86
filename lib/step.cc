#include "lib/step.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "services/convert/tensor.h"

namespace spillway {
namespace {

// More than any model has, so that no size overflows.
constexpr int32_t kShapeMax = 1 << 16;

std::string TextOf(const StepShape& shape) {
  return absl::StrCat(shape.query_head_count, " query heads, ", shape.kv_head_count,
                      " KV heads of ", shape.head_dim, " and row_dtype ", shape.row_dtype);
}

}  // namespace

absl::StatusOr<StepDescription> DescriptionOf(std::string_view text, int32_t query_head_count,
                                              int32_t kv_head_count, int32_t head_dim,
                                              int32_t row_dtype) {
  StepDescription made;
  made.text = text;
  if (!made.message.ParseFromArray(text.data(), static_cast<int>(text.size()))) {
    return absl::InvalidArgumentError("the description is not a serialised spillway.v1.DecodeStep");
  }
  made.shape = {made.message.parts_size(),
                made.message.token_count(),
                query_head_count,
                kv_head_count,
                head_dim,
                static_cast<uint32_t>(row_dtype)};
  const std::optional<DType> dtype = FromProto(static_cast<v1::DType>(row_dtype));
  const auto [least, most] = std::minmax({query_head_count, kv_head_count, head_dim});
  if (!dtype || least < 1 || most > kShapeMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("shape: ", TextOf(made.shape), ": counts must be in [1, ", kShapeMax,
                     "], and row_dtype SPILLWAY_F32, SPILLWAY_F16 or SPILLWAY_BF16"));
  }
  made.row_dtype = *dtype;
  return made;
}

absl::Status CheckShape(const StepShape& given, const StepShape& actual) {
  if (given.query_head_count == actual.query_head_count &&
      given.kv_head_count == actual.kv_head_count && given.head_dim == actual.head_dim &&
      given.row_dtype == actual.row_dtype) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("shape: ", TextOf(given), "; the model has ", TextOf(actual)));
}

}  // namespace spillway

#include "services/convert/status.h"

#include "engine/errors.h"
#include "google/rpc/error_details.pb.h"
#include "gtest/gtest.h"

namespace spillway {
namespace {

StatusConverter Converter() {
  return {"b00t", "", [](const absl::Status& status) { return status; },
          [](const absl::Status&, const std::string&, std::string_view) {}};
}

TEST(StatusConverter, CutsLongTexts) {
  const std::string shape(5000, '7');
  std::vector<FieldError> fields(100, {"field." + shape, "description " + shape});
  const absl::Status status =
      WithMetadata(InvalidFields(fields), {{"shape", shape}, {"short", "text"}});
  const google::rpc::Status rpc = Converter().ToRpc(status);
  EXPECT_LT(rpc.message().size(), 1100);
  EXPECT_EQ(rpc.message().substr(0, 10), status.message().substr(0, 10));
  EXPECT_NE(rpc.message().find("... (cut, of "), std::string::npos);
  // The details repeat the message. The total is less than the size of headers that clients accept.
  EXPECT_LT(rpc.ByteSizeLong(), 6000);
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(info.ParseFromString(rpc.details(0).value()));
  EXPECT_EQ(info.reason(), "INVALID_FIELD");
  EXPECT_EQ(info.metadata().at("short"), "text");
  EXPECT_LT(info.metadata().at("shape").size(), 300);
  google::rpc::BadRequest bad_request;
  ASSERT_TRUE(bad_request.ParseFromString(rpc.details(1).value()));
  EXPECT_GE(bad_request.field_violations_size(), 2);
}

TEST(StatusConverter, CutsBetweenCharacters) {
  std::string text;
  for (int i = 0; i < 1000; ++i) text += "\u00e9";  // two bytes each
  const std::string message = Converter().ToRpc(absl::InternalError("x" + text)).message();
  const size_t end = message.find("...");
  ASSERT_NE(end, std::string::npos);
  EXPECT_EQ(end % 2, 1);
  EXPECT_EQ(message.substr(0, end), ("x" + text).substr(0, end));
}

}  // namespace
}  // namespace spillway

#include "services/fill_page.h"

#include "gtest/gtest.h"
#include "spillway/v1/model_service.pb.h"

namespace spillway {
namespace {

struct Item {
  std::string id;
  size_t bytes = 0;
};

Page<Item> PageOf(std::initializer_list<size_t> sizes, bool more) {
  Page<Item> page;
  page.more = more;
  for (const size_t bytes : sizes) {
    const char letter = static_cast<char>('a' + page.items.size());
    page.items.push_back(std::make_shared<Item>(Item{std::string(1, letter), bytes}));
  }
  return page;
}

v1::Model ToProto(const Item& item) {
  v1::Model model;
  model.set_name(std::string(item.bytes, 'x'));
  return model;
}

TEST(FillPage, TellsWhatFollows) {
  v1::ListModelsResponse response;
  EXPECT_EQ(FillPage(PageOf({1, 2, 3}, false), *response.mutable_models(), ToProto), "");
  EXPECT_EQ(response.models_size(), 3);
  EXPECT_EQ(response.models(2).name(), "xxx");
  response.Clear();
  EXPECT_EQ(FillPage(PageOf({1, 2, 3}, true), *response.mutable_models(), ToProto), PageToken("c"));
  EXPECT_EQ(response.models_size(), 3);
  response.Clear();
  EXPECT_EQ(FillPage(PageOf({}, false), *response.mutable_models(), ToProto), "");
}

TEST(FillPage, EndsWhereAMessageIsFull) {
  constexpr size_t kMiB = size_t{1} << 20;
  v1::ListModelsResponse response;
  EXPECT_EQ(
      FillPage(PageOf({kMiB, kMiB, kMiB, kMiB, kMiB}, false), *response.mutable_models(), ToProto),
      PageToken("b"));
  EXPECT_EQ(response.models_size(), 2);
  response.Clear();
  // The message is full, but no item follows.
  EXPECT_EQ(FillPage(PageOf({kMiB, kMiB}, false), *response.mutable_models(), ToProto), "");
  EXPECT_EQ(response.models_size(), 2);
}

}  // namespace
}  // namespace spillway

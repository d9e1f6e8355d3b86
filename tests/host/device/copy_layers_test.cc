#include "host/device/copy_layers.h"

#include <gtest/gtest.h>

namespace spillway {
namespace {

constexpr int kLayers = 28;

TEST(CopyLayers, AllLayersHaveCopiesWhileTheyFit) {
  CopyLayers layers(kLayers);
  EXPECT_EQ(layers.count(), 28);
  // The other 27 layers need 27 x (90 + 10), and the first one 10 more.
  layers.Fit({.of_first = 90, .of_others = 2400, .free = 310, .ahead = 10});
  EXPECT_EQ(layers.count(), 28);
  EXPECT_TRUE(layers.AllFit({.of_first = 90, .of_others = 2400, .free = 310, .ahead = 10}));
  EXPECT_FALSE(layers.AllFit({.of_first = 90, .of_others = 2400, .free = 309, .ahead = 10}));
  layers.Fit({.of_first = 90, .of_others = 2400, .free = 309, .ahead = 10});
  EXPECT_EQ(layers.count(), 27);
}

TEST(CopyLayers, TheLastLayersLoseTheirsWhenSequencesGrow) {
  CopyLayers layers(kLayers);
  layers.Fit({.of_first = 190, .of_others = 2600, .free = 10, .ahead = 10});
  EXPECT_EQ(layers.count(), 14);
  layers.Fit({.of_first = 2000, .of_others = 800, .free = 0, .ahead = 10});
  EXPECT_EQ(layers.count(), 1);
  // The first layer keeps what it can.
  layers.Fit({.of_first = 2800, .of_others = 0, .free = 0, .ahead = 10});
  EXPECT_EQ(layers.count(), 1);
}

TEST(CopyLayers, LayersMakeRoomForCodes) {
  CopyLayers layers(kLayers);
  // 700 pages are missing for codes, so the others keep 2,000 of 2,700: 20 layers of 100.
  layers.Fit({.of_first = 100, .of_others = 2700, .free = -700, .ahead = 0});
  EXPECT_EQ(layers.count(), 21);
  layers.Fit({.of_first = 100, .of_others = 300, .free = -700, .ahead = 0});
  EXPECT_EQ(layers.count(), 1);
}

TEST(CopyLayers, TheyGetThemBackWithAnEighthToSpare) {
  CopyLayers layers(kLayers);
  layers.Fit({.of_first = 200, .of_others = 2600, .free = 0, .ahead = 0});
  ASSERT_EQ(layers.count(), 14);
  // 14 others need 2,590 pages of 185, and with an eighth more 2,926 of 209.
  layers.Fit({.of_first = 185, .of_others = 2405, .free = 195, .ahead = 0});
  EXPECT_EQ(layers.count(), 14);
  // Of 165, and with the eighth, rounded up: 14 x 186 = 2,604.
  layers.Fit({.of_first = 165, .of_others = 2145, .free = 458, .ahead = 0});
  EXPECT_EQ(layers.count(), 14);
  EXPECT_FALSE(layers.MayRise({.of_first = 165, .of_others = 2145, .free = 458, .ahead = 0}));
  EXPECT_TRUE(layers.MayRise({.of_first = 165, .of_others = 2145, .free = 459, .ahead = 0}));
  layers.Fit({.of_first = 165, .of_others = 2145, .free = 459, .ahead = 0});
  EXPECT_EQ(layers.count(), 15);
  layers.Fit({.of_first = 0, .of_others = 0, .free = 2800, .ahead = 0});
  EXPECT_EQ(layers.count(), 28);
  EXPECT_FALSE(layers.MayRise({.of_first = 0, .of_others = 0, .free = 2800, .ahead = 0}));
}

TEST(CopyLayers, OneLayerLessWhenTheOthersHaveGivenUpTheirs) {
  CopyLayers layers(3);
  EXPECT_TRUE(layers.Lower({.of_first = 10, .of_others = 20, .free = 1, .ahead = 0}));
  EXPECT_EQ(layers.count(), 2);
  // Sequences still hold pages of the third layer.
  EXPECT_FALSE(layers.Lower({.of_first = 10, .of_others = 20, .free = 1, .ahead = 0}));
  EXPECT_FALSE(layers.Lower({.of_first = 10, .of_others = 11, .free = 1, .ahead = 0}));
  EXPECT_TRUE(layers.Lower({.of_first = 10, .of_others = 10, .free = 1, .ahead = 0}));
  EXPECT_EQ(layers.count(), 1);
  EXPECT_FALSE(layers.Lower({.of_first = 10, .of_others = 0, .free = 1, .ahead = 0}));
  EXPECT_EQ(layers.count(), 1);
}

}  // namespace
}  // namespace spillway

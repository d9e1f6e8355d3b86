// Codes of closed pages: when they are computed, and that they do not change.
#include "host/cpu/cpu_state.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/host/cpu/cpu_layer.h"

namespace spillway {
namespace {

using reference::Context;

constexpr int64_t kPage = 128;

class CpuIndex : public ::testing::TestWithParam<int> {  // bits per dimension
 protected:
  CpuIndex()
      : spec_(RotationSpec(2, 2, 64, DType::kBF16, GetParam())),
        world_(spec_),
        context_(reference::TraceContext(spec_, 2500, 61)),
        other_(reference::TraceContext(spec_, 2500, 62)) {}

  using Pages = std::vector<std::vector<std::byte>>;
  // The codes of pages [from, to) of every KV head.
  Pages Codes(const CpuLayer& layer, int64_t from, int64_t to) const {
    Pages pages;
    for (int h = 0; h < spec_.kv_head_count; ++h) {
      for (int64_t p = from; p < to; ++p) pages.push_back(layer.Codes(h, p));
    }
    return pages;
  }
  // Tokens [0, cut) of the context, then tokens [cut, to) of the other, in one append each.
  CpuLayer Mixed(int64_t cut, int64_t to) {
    CpuLayer layer(world_);
    if (cut > 0) layer.Append(context_, 0, cut);
    layer.Append(other_, cut, to);
    return layer;
  }
  void ExpectSame(const CpuLayer& a, const CpuLayer& b, const std::string& what) {
    ASSERT_EQ(a.rows().token_count(), b.rows().token_count()) << what;
    const int64_t closed = a.rows().token_count() / kPage;
    EXPECT_EQ(Codes(a, 0, closed), Codes(b, 0, closed)) << what;
    for (int h = 0; h < spec_.kv_head_count; ++h) {
      const HeadStatistics &x = *a.index().Statistics(h), &y = *b.index().Statistics(h);
      EXPECT_EQ(x.median_radius, y.median_radius) << what;
      EXPECT_EQ(x.value_reference, y.value_reference) << what;
      EXPECT_EQ(x.value_unit, y.value_unit) << what;
      EXPECT_EQ(x.value_floor, y.value_floor) << what;
      EXPECT_EQ(a.index().first_rows[h].value_centre, b.index().first_rows[h].value_centre) << what;
    }
  }

  const ModelSpec spec_;
  CpuWorld world_;
  const Context context_;
  const Context other_;
};

TEST_P(CpuIndex, BeginsWith1024Tokens) {
  CpuLayer layer(world_);
  layer.Append(context_, 0, 1023);
  EXPECT_EQ(layer.index().Statistics(0), nullptr);
  EXPECT_EQ(layer.index_bytes(), 0);
  layer.Append(context_, 1023, 1024);
  ASSERT_NE(layer.index().Statistics(0), nullptr);
  EXPECT_GT(layer.index().Statistics(1)->median_radius, 0);
  CpuLayer whole(world_);
  whole.Append(context_, 0, 1024);
  ExpectSame(layer, whole, "1,023 and one");
}

TEST_P(CpuIndex, DoesNotDependOnHowTokensCome) {
  CpuLayer whole(world_);
  whole.Append(context_, 0, 1700);
  for (const int64_t chunk : {1, 3, 100, 128, 129, 1024}) {
    CpuLayer pieces(world_);
    pieces.Append(context_, 0, 1700, chunk);
    ExpectSame(pieces, whole, "chunk " + std::to_string(chunk));
  }
}

TEST_P(CpuIndex, ShortJobsGoBeforeTheRestOfALongAppend) {
  ShortJobs short_jobs;
  bool served = false;
  short_jobs.Push({.owner = 1, .work = 10, .run = [&] { served = true; }});
  CpuLayer layer(world_), undisturbed(world_);
  layer.set_loops({&short_jobs, 40});
  layer.Append(context_, 0, 2400);
  EXPECT_TRUE(served);
  undisturbed.Append(context_, 0, 2400);
  ExpectSame(layer, undisturbed, "beside a short job");
}

TEST_P(CpuIndex, CodesOfClosedPagesStay) {
  CpuLayer layer(world_);
  layer.Append(context_, 0, 1500);
  const Pages codes = Codes(layer, 0, 11);
  layer.Append(context_, 1500, 1536, 1);
  layer.Append(context_, 1536, 2400);
  EXPECT_EQ(Codes(layer, 0, 11), codes);
  // A cut at a page's border, and appends after it, do not change them either.
  layer.Truncate(11 * kPage);
  EXPECT_EQ(Codes(layer, 0, 11), codes);
  layer.Append(other_, 11 * kPage, 2000, 300);
  EXPECT_EQ(Codes(layer, 0, 11), codes);
  ExpectSame(layer, Mixed(11 * kPage, 2000), "cut at a border");
}

// A cut within a closed page opens it. It is encoded again when it closes.
TEST_P(CpuIndex, AnOpenedPageIsEncodedAnew) {
  for (const int64_t cut : {10 * kPage + 1, 10 * kPage + 77, 11 * kPage - 1}) {
    CpuLayer layer(world_);
    layer.Append(context_, 0, 1500);
    const Pages before = Codes(layer, 0, 10), opened = Codes(layer, 10, 11);
    layer.Truncate(cut);
    EXPECT_EQ(layer.index().token_count, cut);
    EXPECT_EQ(Codes(layer, 0, 10), before);
    layer.Append(other_, cut, 11 * kPage - 1 > cut ? 11 * kPage - 1 : cut + 1);
    if (layer.rows().token_count() < 11 * kPage) {
      layer.Append(other_, layer.rows().token_count(), 11 * kPage);
    }
    EXPECT_EQ(Codes(layer, 0, 10), before);
    EXPECT_NE(Codes(layer, 10, 11), opened);
    ExpectSame(layer, Mixed(cut, 11 * kPage), "cut at " + std::to_string(cut));
  }
}

TEST_P(CpuIndex, StatisticsAreForgottenBelow1024Tokens) {
  CpuLayer layer(world_);
  layer.Append(context_, 0, 1500);
  const float radius = layer.index().Statistics(0)->median_radius;
  layer.Truncate(1024);
  ASSERT_NE(layer.index().Statistics(0), nullptr);
  EXPECT_EQ(layer.index().Statistics(0)->median_radius, radius);
  layer.Append(other_, 1024, 1300);
  ExpectSame(layer, Mixed(1024, 1300), "cut at 1,024");
  layer.Truncate(1023);
  EXPECT_EQ(layer.index().Statistics(0), nullptr);
  EXPECT_EQ(layer.index().token_count, 0);
  EXPECT_EQ(layer.index_bytes(), 0);
  layer.Append(other_, 1023, 1300);
  ExpectSame(layer, Mixed(1023, 1300), "cut at 1,023");
}

TEST_P(CpuIndex, ForksShareClosedPagesAndNothingElse) {
  for (const int64_t at : {700, 1023, 1024, 1100, 1152, 1500}) {
    const std::string what = "fork at " + std::to_string(at);
    CpuLayer parent(world_);
    parent.Append(context_, 0, 1500);
    const Pages codes = Codes(parent, 0, 11);
    CpuLayer fork = parent.Fork(at);
    EXPECT_EQ(fork.index().Statistics(0) != nullptr, at >= 1024) << what;
    // The fork writes to the page in which it ends, or the next; then the parent to its last page.
    fork.Append(other_, at, 1700, 50);
    EXPECT_EQ(Codes(parent, 0, 11), codes) << what;
    parent.Append(context_, 1500, 1700, 50);
    EXPECT_EQ(Codes(parent, 0, 11), codes) << what;
    ExpectSame(fork, Mixed(at, 1700), what);
    CpuLayer plain(world_);
    plain.Append(context_, 0, 1700);
    ExpectSame(parent, plain, what + ", the parent");
    parent.Truncate(500);
    ExpectSame(fork, Mixed(at, 1700), what + " after its parent's cut");
  }
}

INSTANTIATE_TEST_SUITE_P(Bits, CpuIndex, ::testing::Values(1, 3),
                         [](const auto& info) { return "b" + std::to_string(info.param); });

}  // namespace
}  // namespace spillway

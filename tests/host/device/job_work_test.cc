#include "host/device/job_work.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace spillway {
namespace {

class Model final : public DeviceModel {
 public:
  explicit Model(HashKind hash) {
    spec_.layer_count = 1;
    spec_.kv_head_count = 2;
    spec_.query_head_count = 8;
    spec_.head_dim = 64;
    spec_.dtype = DType::kBF16;  // 256 bytes a row, 512 a token
    spec_.hash.kind = hash;
    EXPECT_TRUE(Normalize(spec_).empty());
  }
  const ModelSpec& spec() const override { return spec_; }
  int64_t bytes() const override { return 0; }

 private:
  ModelSpec spec_;
};

constexpr int64_t kTokenBytes = 512;
constexpr int64_t kIndexTokenBytes = 100;

Job AttendsTo(DeviceModel& model, const Policy& policy, std::vector<int64_t> visible) {
  Job job;
  job.model = &model;
  AttendQuery& attend = job.items.emplace_back().attend.emplace();
  attend.policy = policy;
  attend.query_count = static_cast<int64_t>(visible.size());
  attend.visible = std::move(visible);
  return job;
}

TEST(JobWorkTest, ADenseQueryReadsEveryRow) {
  Model model(HashKind::kRotation);
  Policy policy;
  policy.selector = Selector::kAll;
  const Job job = AttendsTo(model, policy, {10000, 20000});
  EXPECT_EQ(RowBytes(job), 30000 * kTokenBytes);
  EXPECT_EQ(WorkOf(job, kIndexTokenBytes), 30000 * kTokenBytes);
}

TEST(JobWorkTest, ASparseQueryReadsItsIndexAndAQuarterOfTheRows) {
  Model model(HashKind::kRotation);
  const Job job = AttendsTo(model, Policy(), {16000});
  EXPECT_EQ(RowBytes(job), 16000 * kTokenBytes);
  EXPECT_EQ(WorkOf(job, kIndexTokenBytes), 16000 * kIndexTokenBytes + 4000 * kTokenBytes);
}

TEST(JobWorkTest, ASparseQueryReadsNoMoreRowsThanItsPolicyLetsIt) {
  Model model(HashKind::kRotation);
  Policy policy;
  policy.row_count_max = 1000;
  EXPECT_EQ(WorkOf(AttendsTo(model, policy, {16000}), kIndexTokenBytes),
            16000 * kIndexTokenBytes + 1000 * kTokenBytes);
  policy.row_count_max = 0;
  policy.heavy_kind = HeavyKind::kCount;
  policy.heavy_count = 8000;  // plus 64 of the sink and 64 of the window
  EXPECT_EQ(WorkOf(AttendsTo(model, policy, {16000}), kIndexTokenBytes),
            16000 * kIndexTokenBytes + 8128 * kTokenBytes);
}

TEST(JobWorkTest, AppendedRowsAreIndexedWhereThereIsAnIndex) {
  for (const bool index : {false, true}) {
    Model model(index ? HashKind::kRotation : HashKind::kNone);
    Job job;
    job.model = &model;
    job.items.emplace_back().append.emplace().count = 100;
    EXPECT_EQ(RowBytes(job), 100 * kTokenBytes);
    EXPECT_EQ(WorkOf(job, kIndexTokenBytes), 100 * kTokenBytes * (index ? kIndexedRowReads : 1));
  }
}

TEST(JobWorkTest, ItemsAddUp) {
  Model model(HashKind::kRotation);
  Job job = AttendsTo(model, Policy(), {1000});  // short, so the attend is dense
  job.items.push_back(job.items[0]);
  job.items[1].append.emplace().count = 1;
  EXPECT_EQ(RowBytes(job), 2001 * kTokenBytes);
  EXPECT_EQ(WorkOf(job, kIndexTokenBytes), (2000 + kIndexedRowReads) * kTokenBytes);
}

}  // namespace
}  // namespace spillway

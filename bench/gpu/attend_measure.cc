#include "bench/gpu/attend_measure.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/gpu/attend_check.h"
#include "host/base/status_macros.h"

namespace spillway::bench {
namespace {

using Mode = GpuFixture::Mode;

// The largest relative error of an output against weighted attention over the selected rows.
constexpr double kTolerance = 1e-4;

template <typename T>
T Median(std::vector<T> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

}  // namespace

absl::StatusOr<Checked> Check(GpuFixture& fixture, const std::string& name,
                              const AttendRequest& request) {
  auto attended = fixture.Attend(request, Mode::kPlain);
  if (!attended.ok()) return attended.status();
  auto selected = fixture.Attend(request, Mode::kSelect);
  if (!selected.ok()) return selected.status();
  const std::vector<double> wanted =
      SelectedAttention(fixture.spec(), fixture.rows(), request.q, selected->result.selections);
  const std::vector<double> errors = RelativeErrors(fixture.spec(), attended->result.out, wanted);
  Checked checked{*std::move(attended), std::move(selected->result.selections)};
  for (const double error : errors) {
    if (!(error < kTolerance)) {
      return absl::InternalError(
          absl::StrCat(name, " over ", request.visible, " tokens: wrong by ", error));
    }
    checked.error = std::max(checked.error, error);
  }
  return checked;
}

double Timing::StageUs(const std::function<bool(const std::string&)>& counts) const {
  double sum = 0;
  for (const StageTime& stage : stages) sum += counts(stage.name) ? stage.us : 0;
  return sum;
}

absl::StatusOr<Timing> Time(GpuFixture& fixture, int repetitions,
                            const std::function<AttendRequest(int)>& request_at) {
  const int heads = fixture.spec().kv_head_count;
  const int64_t group = fixture.spec().group();
  std::vector<double> us;
  std::vector<int64_t> row_counts, moved_counts;
  std::vector<std::vector<int64_t>> touched(heads), heavy(heads), sampled(heads);
  std::vector<std::string> order;
  std::map<std::string, std::vector<double>> stages;
  for (int i = 0; i < 2 * repetitions; ++i) {
    const bool trace = i >= repetitions;
    const AttendRequest request = request_at(i % repetitions);
    RETURN_IF_ERROR(fixture.FlushCaches());
    const auto attended = fixture.Attend(request, trace ? Mode::kTrace : Mode::kPlain);
    if (!attended.ok()) return attended.status();
    for (const StageTime& stage : attended->stages) {
      if (!stages.contains(stage.name)) order.push_back(stage.name);
      stages[stage.name].push_back(stage.us);
    }
    if (trace) continue;
    const AttendResult& work = attended->result;
    us.push_back(attended->device_time_us);
    row_counts.push_back(0);
    moved_counts.push_back(work.moved_row_count);
    for (int h = 0; h < heads; ++h) {
      row_counts.back() += work.touched_row_counts[h];
      touched[h].push_back(work.touched_row_counts[h]);
      heavy[h].push_back(work.certificates[h * group].heavy_token_count);
      sampled[h].push_back(work.certificates[h * group].sampled_token_count);
    }
  }
  Timing timing;
  timing.us = Median(us);
  timing.us_mean = std::accumulate(us.begin(), us.end(), 0.0) / static_cast<double>(us.size());
  timing.row_count = Median(row_counts);
  timing.moved_count = Median(moved_counts);
  for (int h = 0; h < heads; ++h) {
    timing.touched.push_back(Median(touched[h]));
    timing.heavy.push_back(Median(heavy[h]));
    timing.sampled.push_back(Median(sampled[h]));
  }
  for (const std::string& stage : order) timing.stages.push_back({stage, Median(stages[stage])});
  return timing;
}

}  // namespace spillway::bench

// Selection, two-phase sampling and attention of one query and one KV head.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>

#include "host/base/parallel.h"
#include "host/core/budget.h"
#include "host/core/neyman.h"
#include "host/core/normal.h"
#include "host/core/row_sums.h"
#include "host/cpu/attend_context.h"
#include "host/cpu/lsh_tail.h"
#include "host/cpu/score_pass.h"
#include "host/cpu/tail_sampler.h"

namespace spillway {
namespace {

// Rows that one task folds.
constexpr int64_t kFoldRows = 512;

// Sums of a group's query heads over one set of rows.
struct GroupSums {
  std::vector<RowSums> sums;    // [G]
  std::vector<float> value;     // [G][d]
  std::vector<float> value_sq;  // [G][d], strata only

  GroupSums(int group, int d, bool moments)
      : sums(group), value(group * d, 0.0f), value_sq(moments ? group * d : 0, 0.0f) {}
};

class SparseAttend {
 public:
  SparseAttend(const AttendContext& context, int64_t query, int kv_head)
      : c_(context),
        policy_(context.work->PolicyOf(kv_head)),
        query_(query),
        kv_head_(kv_head),
        n_(context.work->visible[query]),
        group_(context.spec().group()),
        d_(context.spec().head_dim),
        z_(NormalQuantile(1 - policy_.delta / 2)),
        scores_(context, query, kv_head, policy_.sink_token_count, n_ - policy_.window_token_count),
        exact_(group_, d_, false) {}

  absl::Status Run();

 private:
  // Tail rows that row_count_max leaves; the largest count without a limit.
  int64_t RowsLeft() const;
  void CutTail();
  std::vector<int64_t> PilotCounts() const;
  // Folds rows into sums, with moments where it keeps them. With a tail the
  // tokens are its own, and it weighs them.
  absl::Status Fold(std::span<const uint32_t> tokens, GroupSums& into,
                    const LshTail* lsh = nullptr) const;
  absl::Status FoldStrata(const std::vector<std::vector<uint32_t>>& tokens);
  absl::Status SampleTail();
  // Adds what LSH sampling takes to the exact rows' sums.
  absl::Status AddLshTail();
  HeadEstimate Estimate(int head) const;
  // Rows per stratum that the policy's bound asks for, the group's maximum,
  // of a stratum at least `least`.
  std::vector<int64_t> Budgets(std::span<const int64_t> least) const;
  std::vector<int64_t> HeadBudgets(const HeadEstimate& estimate,
                                   std::span<const int64_t> least) const;
  // Draws what the pilot shows to be needed.
  absl::Status DrawBudgets();
  void Limit(std::vector<int64_t>& budgets) const;
  int64_t Drawn() const;
  void WriteOutput();
  void WriteLshCertificate(int head, const HeadEstimate& estimate, Certificate& certificate) const;
  void WriteSelection();

  const AttendContext& c_;
  const Policy& policy_;
  const int64_t query_;
  const int kv_head_;
  const int64_t n_;
  const int group_;
  const int d_;
  const double z_;
  ScorePass scores_;
  std::vector<uint32_t> heavy_;
  Strata strata_;
  std::optional<TailSampler> sampler_;
  std::vector<std::vector<uint32_t>> sampled_;  // per stratum
  GroupQueries q_;                              // scaled
  GroupSums exact_;                             // sink, heavy, window
  std::vector<GroupSums> tail_;                 // per stratum
  bool limited_ = false;                        // row_count_max bound
  std::vector<RowSums> exact_alone_;            // [G] before LSH sampling's
};

absl::Status SparseAttend::Fold(std::span<const uint32_t> tokens, GroupSums& into,
                                const LshTail* lsh) const {
  const LayerRows& rows = *c_.work->rows;
  const DType dtype = c_.spec().dtype;
  const bool moments = !into.value_sq.empty();
  const int64_t count = static_cast<int64_t>(tokens.size());
  const int64_t tasks = (count + kFoldRows - 1) / kFoldRows;
  std::vector<GroupSums> parts(tasks, GroupSums(group_, d_, moments));
  std::vector<absl::Status> statuses(tasks);
  ParallelFor(int64_t{0}, tasks, [&](int64_t task) {
    statuses[task] = c_.CheckCancelled();
    if (!statuses[task].ok()) return;
    GroupSums& part = parts[task];
    float logits[kGroupMax * kRowBlock];
    const int64_t end = std::min(count, (task + 1) * kFoldRows);
    // Rows of this block and of the one to come: they lie far apart, so their
    // latency is hidden by asking for them a block ahead.
    const std::byte* buffers[2][kRowBlock];
    const auto point = [&](int64_t at, const std::byte** out) {
      for (int64_t i = 0; i < kRowBlock; ++i) {
        out[i] = rows.Row(kv_head_, tokens[std::min(at + i, end - 1)]);
      }
    };
    point(task * kFoldRows, buffers[0]);
    const int first_count = static_cast<int>(std::min<int64_t>(kRowBlock, end - task * kFoldRows));
    for (int i = 0; i < first_count; ++i) PrefetchRow(buffers[0][i], rows.row_bytes());
    int current = 0;
    for (int64_t at = task * kFoldRows; at < end; at += kRowBlock, current ^= 1) {
      const int m = static_cast<int>(std::min<int64_t>(kRowBlock, end - at));
      const std::byte** pointers = buffers[current];
      const std::byte** next = at + kRowBlock < end ? buffers[current ^ 1] : nullptr;
      if (next != nullptr) point(at + kRowBlock, next);
      if (!RowLogits(dtype, pointers, next, m, q_.rows(), logits)) {
        for (int g = 0; g < group_ && statuses[task].ok(); ++g) {
          statuses[task] =
              NonFiniteLogit(c_, kv_head_, logits + g * kRowBlock, tokens.data() + at, m);
        }
        return;
      }
      if (lsh != nullptr) lsh->Weigh(at, m, pointers, logits);
      if (moments) {
        FoldRowsMoments(dtype, pointers, next, m, group_, d_, logits, part.sums.data(),
                        part.value.data(), part.value_sq.data());
      } else {
        FoldRows(dtype, pointers, next, m, nullptr, group_, d_, logits, part.sums.data(),
                 part.value.data());
      }
    }
  });
  for (int64_t task = 0; task < tasks; ++task) {
    if (!statuses[task].ok()) return statuses[task];
    for (int g = 0; g < group_; ++g) {
      const size_t at = static_cast<size_t>(g) * d_;
      const size_t width = moments ? d_ : 0;
      MergeSums(into.sums[g], {into.value.data() + at, size_t(d_)},
                {into.value_sq.data() + (moments ? at : 0), width}, parts[task].sums[g],
                {parts[task].value.data() + at, size_t(d_)},
                {parts[task].value_sq.data() + (moments ? at : 0), width});
    }
  }
  return absl::OkStatus();
}

absl::Status SparseAttend::FoldStrata(const std::vector<std::vector<uint32_t>>& tokens) {
  std::vector<absl::Status> statuses(tokens.size());
  ParallelFor(size_t{0}, tokens.size(), [&](size_t h) { statuses[h] = Fold(tokens[h], tail_[h]); });
  for (size_t h = 0; h < tokens.size(); ++h) {
    if (!statuses[h].ok()) return statuses[h];
    sampled_[h].insert(sampled_[h].end(), tokens[h].begin(), tokens[h].end());
  }
  return absl::OkStatus();
}

int64_t SparseAttend::RowsLeft() const {
  if (policy_.row_count_max == 0) return std::numeric_limits<int64_t>::max();
  // A heavy set by fraction or mass may itself reach the limit.
  return std::max<int64_t>(policy_.row_count_max - policy_.sink_token_count -
                               policy_.window_token_count - static_cast<int64_t>(heavy_.size()),
                           0);
}

void SparseAttend::CutTail() {
  const std::vector<uint32_t>& histogram = scores_.histogram();
  const int64_t tail = std::accumulate(histogram.begin(), histogram.end(), int64_t{0});
  if (tail == 0 || policy_.tail == Tail::kNone || policy_.tail == Tail::kLshSampling) return;
  if (policy_.tail == Tail::kStratified) {
    strata_ = CutStrata(histogram, std::max<int64_t>(1, static_cast<int64_t>(heavy_.size())));
    if (static_cast<int64_t>(strata_.counts.size()) * 2 * kStratumRowsMin <= RowsLeft()) return;
  }
  strata_.of_bin.assign(histogram.size(), 0);
  strata_.counts = {tail};
}

std::vector<int64_t> SparseAttend::PilotCounts() const {
  const int64_t strata = static_cast<int64_t>(strata_.counts.size());
  const int64_t each = std::min<int64_t>(policy_.pilot_token_count, RowsLeft() / (2 * strata));
  std::vector<int64_t> pilots(strata_.counts);
  for (int64_t& p : pilots) {
    if (p > 2 * each) p = each;
  }
  return pilots;
}

int64_t SparseAttend::Drawn() const {
  return std::accumulate(sampler_->counts().begin(), sampler_->counts().end(), int64_t{0});
}

absl::Status SparseAttend::SampleTail() {
  sampler_.emplace(
      scores_, strata_,
      MakeSampleOrder(policy_.seed, c_.layer, kv_head_, n_, c_.spec().SampleBand(policy_.seed)));
  tail_.assign(strata_.counts.size(), GroupSums(group_, d_, true));
  sampled_.resize(strata_.counts.size());
  const int64_t rows_left = RowsLeft();
  if (rows_left == 0) {
    limited_ = true;
    return absl::OkStatus();
  }
  std::vector<int64_t> wanted = PilotCounts();
  std::vector<std::vector<uint32_t>> pilot;
  for (;;) {
    pilot = sampler_->Draw(wanted);
    std::vector<std::vector<uint32_t>> more = sampler_->Widen(kStratumRowsMin);
    for (size_t h = 0; h < pilot.size(); ++h) {
      pilot[h].insert(pilot[h].end(), more[h].begin(), more[h].end());
      std::sort(pilot[h].begin(), pilot[h].end());
    }
    if (Drawn() <= rows_left) break;
    // The draw came out above the limit: a smaller one, before a row is read.
    limited_ = true;
    sampler_->Reset();
    for (int64_t& w : wanted) w = std::max<int64_t>(1, w * 3 / 4);
    if (*std::max_element(wanted.begin(), wanted.end()) == 1) return absl::OkStatus();
  }
  absl::Status status = FoldStrata(pilot);
  if (!status.ok()) return status;
  return DrawBudgets();
}

absl::Status SparseAttend::DrawBudgets() {
  const int64_t rows_left = RowsLeft();
  std::vector<int64_t> budgets = Budgets(sampler_->counts());
  if (std::accumulate(budgets.begin(), budgets.end(), int64_t{0}) > rows_left) {
    limited_ = true;
    Limit(budgets);
  }
  // A draw's size varies; with a limit it is tried on a copy first.
  for (;;) {
    TailSampler trial = *sampler_;
    std::vector<std::vector<uint32_t>> drawn = trial.Draw(budgets);
    const int64_t total = std::accumulate(trial.counts().begin(), trial.counts().end(), int64_t{0});
    if (total <= rows_left) {
      sampler_.emplace(trial);
      return FoldStrata(drawn);
    }
    limited_ = true;
    bool smaller = false;
    for (size_t h = 0; h < budgets.size(); ++h) {
      const int64_t next = std::max(sampler_->counts()[h], budgets[h] * 15 / 16);
      smaller |= next < budgets[h];
      budgets[h] = next;
    }
    if (!smaller) return absl::OkStatus();
  }
}

void SparseAttend::Limit(std::vector<int64_t>& budgets) const {
  // What the pilot drew is spent; the rest is shared in proportion.
  const int64_t drawn = Drawn();
  const int64_t total = std::accumulate(budgets.begin(), budgets.end(), int64_t{0});
  const double share = static_cast<double>(RowsLeft() - drawn) /
                       static_cast<double>(std::max<int64_t>(1, total - drawn));
  for (size_t h = 0; h < budgets.size(); ++h) {
    const int64_t have = sampler_->counts()[h];
    budgets[h] = have + static_cast<int64_t>(share * static_cast<double>(budgets[h] - have));
  }
}

HeadEstimate SparseAttend::Estimate(int head) const {
  const size_t at = static_cast<size_t>(head) * d_;
  std::vector<SampledStratum> strata;
  for (size_t h = 0; h < tail_.size(); ++h) {
    if (tail_[h].sums[head].count == 0) continue;
    strata.push_back({strata_.counts[h],
                      tail_[h].sums[head],
                      {tail_[h].value.data() + at, size_t(d_)},
                      {tail_[h].value_sq.data() + at, size_t(d_)}});
  }
  return EstimateHead(exact_.sums[head], {exact_.value.data() + at, size_t(d_)}, strata);
}

std::vector<int64_t> SparseAttend::HeadBudgets(const HeadEstimate& e,
                                               std::span<const int64_t> least) const {
  const size_t count = strata_.counts.size();
  // Nothing can be said of the error without reading every row.
  if (!(e.norm_sq_unbiased > 0) || !std::isfinite(e.variance)) return strata_.counts;
  std::vector<int64_t> budgets(count);
  if (policy_.tail == Tail::kUniform) {
    const double inflation = policy_.inflation;
    const UniformTail tail{
        static_cast<double>(strata_.counts[0]), inflation * std::sqrt(e.variance_x[0]),
        inflation * inflation * e.trace_n[0],   inflation * inflation * e.trace_o[0],
        std::sqrt(e.norm_sq_unbiased),          e.denominator};
    budgets[0] = FinitePopulation(UniformBudget(policy_.bound, tail, policy_.epsilon,
                                                BoundQuantile(policy_.bound, policy_.delta)),
                                  strata_.counts[0], least[0]);
    return budgets;
  }
  std::vector<NeymanStratum> strata(count);
  for (size_t h = 0; h < count; ++h) {
    strata[h] = {strata_.counts[h], least[h], policy_.inflation * std::sqrt(e.trace_o[h])};
  }
  NeymanAllot(strata, policy_.epsilon * policy_.epsilon * e.norm_sq_unbiased / (z_ * z_), budgets);
  return budgets;
}

std::vector<int64_t> SparseAttend::Budgets(std::span<const int64_t> least) const {
  std::vector<int64_t> budgets(strata_.counts.size(), 0);
  for (int g = 0; g < group_; ++g) {
    const std::vector<int64_t> head = HeadBudgets(Estimate(g), least);
    for (size_t h = 0; h < budgets.size(); ++h) budgets[h] = std::max(budgets[h], head[h]);
  }
  return budgets;
}

absl::Status SparseAttend::AddLshTail() {
  const LshTail tail(c_, scores_, q_, kv_head_);
  GroupSums sums(group_, d_, false);
  absl::Status status = Fold(tail.tokens(), sums, &tail);
  if (!status.ok()) return status;
  exact_alone_ = exact_.sums;
  for (int g = 0; g < group_; ++g) {
    const size_t at = static_cast<size_t>(g) * d_;
    MergeSums(exact_.sums[g], {exact_.value.data() + at, size_t(d_)}, {}, sums.sums[g],
              {sums.value.data() + at, size_t(d_)}, {});
  }
  sampled_.push_back(tail.tokens());
  return absl::OkStatus();
}

void SparseAttend::WriteLshCertificate(int head, const HeadEstimate& estimate,
                                       Certificate& certificate) const {
  const RowSums& alone = exact_alone_[head];
  certificate.promise = Promise::kNone;
  certificate.relative_error = std::numeric_limits<float>::infinity();
  certificate.tail_mass = static_cast<float>(
      1 - alone.sum * std::exp(double{alone.max} - estimate.max) / estimate.denominator);
}

void SparseAttend::WriteOutput() {
  AttendWork& work = *c_.work;
  const int query_heads = c_.spec().query_head_count;
  int64_t drawn = 0;
  for (const auto& tokens : sampled_) drawn += static_cast<int64_t>(tokens.size());
  const int64_t tail_count =
      std::accumulate(scores_.histogram().begin(), scores_.histogram().end(), int64_t{0});
  const int64_t kept = n_ - tail_count;
  work.touched_row_counts[query_ * c_.spec().kv_head_count + kv_head_] = kept + drawn;
  for (int g = 0; g < group_; ++g) {
    const int64_t at = query_ * query_heads + kv_head_ * group_ + g;
    const HeadEstimate e = Estimate(g);
    if (!work.select_only) {
      for (int i = 0; i < d_; ++i) {
        work.out[at * d_ + i] = static_cast<float>(e.numerator[i] / e.denominator);
      }
      work.lse[at] = static_cast<float>(e.max + std::log(e.denominator));
    }
    Certificate& certificate = work.certificates[at];
    certificate.visible_token_count = n_;
    certificate.heavy_token_count = static_cast<int64_t>(heavy_.size());
    certificate.sampled_token_count = drawn;
    if (policy_.tail == Tail::kLshSampling) {
      WriteLshCertificate(g, e, certificate);
      continue;
    }
    if (drawn == tail_count) {
      certificate.promise = Promise::kExact;
      certificate.relative_error = 0;
      certificate.tail_mass = static_cast<float>(1 - e.exact_denominator / e.denominator);
      continue;
    }
    if (drawn == 0) {
      certificate.promise = Promise::kNone;
      certificate.relative_error = std::numeric_limits<float>::infinity();
      certificate.tail_mass = std::numeric_limits<float>::quiet_NaN();
      continue;
    }
    const double error = RelativeError(e, z_);
    const bool bounded = work.MayPromise(c_.spec(), kv_head_, query_);
    certificate.relative_error = static_cast<float>(error);
    certificate.tail_mass = static_cast<float>(1 - e.exact_denominator / e.denominator);
    certificate.promise =
        bounded && !limited_ && error <= policy_.epsilon ? Promise::kStatistical : Promise::kNone;
  }
}

void SparseAttend::WriteSelection() {
  struct Row {
    uint32_t token;
    float log_weight;
    uint8_t stratum;
  };
  std::vector<Row> rows;
  const auto add = [&](uint32_t token, uint8_t stratum) { rows.push_back({token, 0, stratum}); };
  for (int64_t t = 0; t < policy_.sink_token_count; ++t) add(t, kStratumSink);
  for (int64_t t = n_ - policy_.window_token_count; t < n_; ++t) add(t, kStratumWindow);
  for (uint32_t t : heavy_) add(t, kStratumHeavy);
  for (size_t h = 0; h < sampled_.size(); ++h) {
    const double rate = static_cast<double>(strata_.counts[h]) /
                        static_cast<double>(std::max<size_t>(1, sampled_[h].size()));
    for (uint32_t t : sampled_[h]) {
      rows.push_back(
          {t, static_cast<float>(std::log(rate)), static_cast<uint8_t>(kStratumTail + h)});
    }
  }
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.token < b.token; });
  Selection& s = c_.work->selections[query_ * c_.spec().kv_head_count + kv_head_];
  for (const Row& row : rows) {
    s.indices.push_back(row.token);
    s.log_weights.push_back(row.log_weight);
    s.strata.push_back(row.stratum);
  }
}

absl::Status SparseAttend::Run() {
  absl::Status status = scores_.Score();
  if (!status.ok()) return status;
  heavy_ = scores_.TakeHeavy();
  CutTail();
  q_ = GroupQueries(c_, kv_head_, query_, query_ + 1);
  std::vector<uint32_t> always(policy_.sink_token_count);
  std::iota(always.begin(), always.end(), 0u);
  always.insert(always.end(), heavy_.begin(), heavy_.end());
  for (int64_t t = n_ - policy_.window_token_count; t < n_; ++t) {
    always.push_back(static_cast<uint32_t>(t));
  }
  status = Fold(always, exact_);
  if (!status.ok()) return status;
  if (!strata_.counts.empty()) {
    status = SampleTail();
  } else if (policy_.tail == Tail::kLshSampling) {
    status = AddLshTail();
  }
  if (!status.ok()) return status;
  WriteOutput();
  if (c_.work->select_only) WriteSelection();
  return absl::OkStatus();
}

}  // namespace

absl::Status AttendSparse(const AttendContext& context, int64_t query, int kv_head) {
  // Workers that wait for a part of this unit must not start another unit:
  // each holds a workspace.
  return Isolated([&] { return SparseAttend(context, query, kv_head).Run(); });
}

}  // namespace spillway

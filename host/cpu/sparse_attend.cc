// Selection, sampling in several draws, and attention of one query and one group.

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <span>

#include "host/base/parallel.h"
#include "host/base/status_macros.h"
#include "host/core/head_estimate.h"
#include "host/core/tail_draw.h"
#include "host/core/tail_plan.h"
#include "host/cpu/attend_context.h"
#include "host/cpu/cpu_method.h"
#include "host/cpu/group_sums.h"
#include "host/cpu/score_pass.h"
#include "host/cpu/tail_sampler.h"
#include "host/cpu/value_pass.h"
#include "host/device/results.h"

namespace spillway {
namespace {

class SparseAttend {
 public:
  SparseAttend(const AttendContext& context, int64_t query, int group_index, StageClock* clock)
      : c_(context),
        clock_(clock),
        policy_(context.attend->policy),
        query_(query),
        group_index_(group_index),
        kv_head_(context.spec().KvHeadOf(group_index)),
        n_(context.attend->visible[query]),
        group_(context.spec().group()),
        terms_(TermsOf(policy_, context.attend->TailOf(kv_head_),
                       context.attend->MayPromise(context.spec(), kv_head_, query))),
        q_(context, group_index * group_, group_, query, query + 1),
        keys_{&context,
              &q_,
              query,
              kv_head_,
              policy_.sink_token_count,
              policy_.ScoredEnd(context.spec(), n_)},
        values_(TermsOfValues()),
        values_can_be_sampled_(statistics() == nullptr ||
                               ValuesCanBeSampled(statistics()->value_floor)),
        scores_(keys_, policy_.selector, policy_.heavy_kind == HeavyKind::kMass,
                policy_.AnswersFromCodes(context.spec(), terms_.tail)),
        exact_(group_, context.spec().head_dim, /*moments=*/false) {}

  absl::Status Run();

 private:
  // Statistics of the KV head; null: the model has no rotation.
  const HeadStatistics* statistics() const {
    return c_.index == nullptr ? nullptr : c_.index->Statistics(kv_head_);
  }
  ValueTerms TermsOfValues() const;
  int64_t window() const { return n_ - keys_.end; }
  // Chooses the heavy set. If the set is adaptive, the error of the ranks decides its size.
  void TakeHeavy(const KeyScorer& scorer);
  void CutTail();
  // Sums what codes answer for the tail, if the model has value codes and the policy uses them.
  absl::Status SumCodes(const KeyScorer& scorer);
  absl::Status SampleTail(const KeyScorer& scorer);
  // Draws the tokens between the thresholds, again until `judge` accepts the draw, and folds their
  // rows.
  template <typename Judge>
  absl::Status Draw(TailSampler& sampler, Judge judge);
  // Computes the budget of each stratum: the rows that the bound needs, estimated from the sums so
  // far; the maximum over `heads`, limited by row_count_max.
  void SetBudgets(std::span<const int> heads, const TailTerms& terms);
  // Estimates every query head from the sums so far.
  void EstimateHeads();
  HeadCertificate Certified(int head) const;
  // Adds the rows of a method's tail to the sums of the exact rows.
  absl::Status AddTailOf(const CpuMethod& method);
  HeadEstimate Estimate(int head) const;
  float SinkLogit(int head) const {
    return c_.spec().SinkLogit(c_.layer, group_index_ * group_ + head);
  }
  int64_t DrawnCount() const;
  void WriteOutput();
  void WriteSelection();

  void End(JobStage stage) {
    if (clock_ != nullptr) clock_->End(stage);
  }

  const AttendContext& c_;
  StageClock* const clock_;
  const Policy& policy_;
  const int64_t query_;
  const int group_index_;
  const int kv_head_;
  const int64_t n_;
  const int group_;
  const TailTerms terms_;
  const GroupQueries q_;
  const ScoredKeys keys_;
  const ValueTerms values_;
  const bool values_can_be_sampled_;
  ScorePass scores_;
  std::vector<double> rank_variance_;  // [G]
  HeavySet heavy_set_{};
  std::vector<uint32_t> heavy_;
  int64_t tail_count_ = 0;
  Strata strata_;
  TailDraw draw_{};
  std::unique_ptr<ValuePass> codes_;            // null: rows alone answer
  std::vector<CodeSums> code_sums_;             // [G], with codes_
  std::vector<std::vector<uint32_t>> sampled_;  // per stratum
  GroupSums exact_;                             // sink, heavy, window
  std::vector<GroupSums> tail_;                 // per stratum
  std::vector<HeadEstimate> estimates_;         // [G]
};

ValueTerms SparseAttend::TermsOfValues() const {
  const int d = c_.spec().head_dim;
  ValueTerms values;
  if (statistics() != nullptr) values.unit = statistics()->value_unit;
  const ProjectionSigns signs = ProjectionSigns::Of(policy_.seed);
  values.signs.resize(d);
  for (int i = 0; i < d; ++i) values.signs[i] = signs.Of(i, 1.0f);
  return values;
}

void SparseAttend::TakeHeavy(const KeyScorer& scorer) {
  rank_variance_.assign(group_, 0.0);
  if (policy_.KnowsRankError()) scorer.RankVariances(rank_variance_);
  const bool adaptive = policy_.heavy_kind == HeavyKind::kAdaptive;
  int64_t wanted = scores_.by_mass() ? 0 : policy_.HeavyCount(n_);
  if (adaptive && policy_.KnowsRankError()) {
    for (const double variance : rank_variance_) {
      wanted = std::max(wanted, AdaptiveHeavyCount(variance));
    }
  }
  heavy_set_ = HeavySet::Of(wanted, adaptive, scores_.stray_count(), terms_.row_count_max,
                            policy_.sink_token_count, window());
  heavy_ = scores_.TakeHeavy(heavy_set_);
}

void SparseAttend::CutTail() {
  const std::vector<uint32_t>& histogram = scores_.histogram();
  tail_count_ = std::accumulate(histogram.begin(), histogram.end(), int64_t{0});
  const auto heavy = static_cast<int64_t>(heavy_.size());
  draw_.rows_left = TailRowsLeft(terms_.row_count_max, policy_.sink_token_count, window(), heavy);
  const bool stratified = terms_.tail == Tail::kStratified;
  if (tail_count_ == 0 || (!stratified && terms_.tail != Tail::kUniform)) return;
  if (stratified) {
    strata_ = CutStrata(histogram, std::max<int64_t>(1, heavy - heavy_set_.strays));
  }
  if (!stratified || !StrataFit(strata_.size(), draw_.rows_left)) {
    strata_ = OneStratum(histogram.size(), tail_count_);
  }
}

absl::Status SparseAttend::SumCodes(const KeyScorer& scorer) {
  if (scores_.levels() == nullptr) return absl::OkStatus();
  codes_ = std::make_unique<ValuePass>(keys_, scorer, scores_, values_.unit);
  RETURN_IF_ERROR(codes_->Sum(strata_));
  for (int g = 0; g < group_; ++g) code_sums_.push_back(codes_->SumsOf(g));
  return absl::OkStatus();
}

absl::Status SparseAttend::SampleTail(const KeyScorer& scorer) {
  RETURN_IF_ERROR(SumCodes(scorer));
  const int strata = strata_.size();
  tail_.assign(strata, GroupSums(group_, c_.spec().head_dim, /*moments=*/true));
  sampled_.resize(strata);
  draw_.strata = strata;
  if (draw_.rows_left == 0) {
    draw_.limited = true;
    return absl::OkStatus();
  }
  TailSampler sampler(scores_, strata_,
                      MakeSampleOrder(policy_.seed, c_.spec().first_layer + c_.layer,
                                      c_.spec().first_kv_head + kv_head_, n_,
                                      c_.spec().ResidentSample(policy_.seed)));
  std::vector<int> heads(group_);
  std::iota(heads.begin(), heads.end(), 0);
  std::copy(strata_.counts.begin(), strata_.counts.end(), draw_.token_count);
  if (codes_ != nullptr) {
    EstimateHeads();
    TailTerms predicted = terms_;
    predicted.inflation = PredictedInflation(terms_.inflation);
    SetBudgets(heads, predicted);
  } else {
    for (int h = 0; h < strata; ++h) {
      const int64_t count = strata_.counts[h];
      draw_.wanted[h] = PilotCount(terms_.pilot_count, draw_.rows_left, strata, count);
      draw_.threshold[h] = SampleThreshold(draw_.wanted[h], count);
    }
  }
  RETURN_IF_ERROR(Draw(sampler, [&](const int64_t* counts, TailDraw& draw) {
    return codes_ != nullptr ? JudgeFirst(counts, draw) : JudgePilot(counts, draw);
  }));
  if (draw_.given_up) return absl::OkStatus();
  EstimateHeads();
  // Predicted budgets usually suffice.
  if (codes_ != nullptr) {
    std::erase_if(heads,
                  [&](int g) { return !WantsSecondDraw(terms_, draw_.limited, Certified(g)); });
    if (heads.empty()) return absl::OkStatus();
  }
  SetBudgets(heads, terms_);
  RETURN_IF_ERROR(Draw(sampler, JudgeSample));
  EstimateHeads();
  // With codes, a third draw is needed so seldom that it is not worth its kernels on a GPU.
  if (codes_ != nullptr) return absl::OkStatus();
  std::erase_if(heads, [&](int g) { return !WantsMoreRows(terms_, draw_.limited, Certified(g)); });
  if (heads.empty()) return absl::OkStatus();
  TailTerms more = terms_;
  more.inflation *= kMoreInflation;
  SetBudgets(heads, more);
  RETURN_IF_ERROR(Draw(sampler, JudgeSample));
  EstimateHeads();
  return absl::OkStatus();
}

template <typename Judge>
absl::Status SparseAttend::Draw(TailSampler& sampler, Judge judge) {
  const size_t strata = strata_.counts.size();
  std::vector<std::vector<uint32_t>> tokens;
  int64_t counts[kTailStrataMax];
  do {
    tokens = sampler.Draw({draw_.drawn_threshold, strata}, {draw_.threshold, strata});
    for (size_t h = 0; h < strata; ++h) counts[h] = static_cast<int64_t>(tokens[h].size());
  } while (judge(counts, draw_) == DrawVerdict::kDrawAgain);
  End(JobStage::kSample);
  std::vector<absl::Status> statuses(strata);
  ParallelFor(size_t{0}, strata, [&](size_t h) {
    statuses[h] =
        FoldTokens(c_, kv_head_, q_, values_, tokens[h], tail_[h], {.codes = codes_.get()});
  });
  for (size_t h = 0; h < strata; ++h) {
    RETURN_IF_ERROR(statuses[h]);
    sampled_[h].insert(sampled_[h].end(), tokens[h].begin(), tokens[h].end());
    draw_.drawn[h] += counts[h];
    draw_.drawn_threshold[h] = draw_.threshold[h];
  }
  End(JobStage::kFold);
  return absl::OkStatus();
}

HeadEstimate SparseAttend::Estimate(int head) const {
  std::vector<StratumSums> strata;
  for (size_t h = 0; h < tail_.size(); ++h) {
    strata.push_back({strata_.counts[h], tail_[h].sums[head], tail_[h].ValueOf(head),
                      tail_[h].ValueSqOf(head), tail_[h].ProjectedOf(head)});
  }
  static const CodeSums kNoCodes;
  return EstimateHead(exact_.sums[head], exact_.ValueOf(head), strata, values_.signs,
                      codes_ == nullptr ? kNoCodes : code_sums_[head], SinkLogit(head));
}

void SparseAttend::EstimateHeads() {
  estimates_.clear();
  for (int g = 0; g < group_; ++g) estimates_.push_back(Estimate(g));
}

HeadCertificate SparseAttend::Certified(int head) const {
  const bool ranks_hold =
      heavy_set_.strays_fit && values_can_be_sampled_ && RanksHold(rank_variance_[head]);
  return Certify(terms_, draw_.limited, ranks_hold, DrawnCount(), tail_count_, estimates_[head]);
}

void SparseAttend::SetBudgets(std::span<const int> heads, const TailTerms& terms) {
  const int strata = strata_.size();
  std::vector<int64_t> budgets(strata, 0), of_head(strata);
  std::vector<NeymanStratum> asked(strata);
  for (const int g : heads) {
    const HeadEstimate& estimate = estimates_[g];
    for (int h = 0; h < strata; ++h) {
      const int64_t count = strata_.counts[h];
      const int64_t floor =
          draw_.drawn[h] > 0 ? draw_.drawn[h] : FirstDrawRows(terms.pilot_count, count);
      asked[h] = BudgetStratum(terms, count, floor, estimate.spreads[h]);
    }
    HeadBudgets(terms, estimate, estimate.spreads[0], asked, of_head);
    for (int h = 0; h < strata; ++h) budgets[h] = std::max(budgets[h], of_head[h]);
    if (!estimate.from_codes) continue;
    ClearBudgets(StrataInTurn{strata}, terms, estimate, estimate.spreads.data(), asked.data(),
                 of_head.data());
    for (int h = 0; h < strata; ++h) budgets[h] = std::max(budgets[h], of_head[h]);
  }
  const int64_t total = std::accumulate(budgets.begin(), budgets.end(), int64_t{0});
  if (total > draw_.rows_left) {
    draw_.limited = true;
    const RowShare share = RowShare::Of(draw_.rows_left, DrawnCount(), total);
    for (int h = 0; h < strata; ++h) budgets[h] = share.Cut(draw_.drawn[h], budgets[h]);
  }
  for (int h = 0; h < strata; ++h) {
    draw_.wanted[h] = budgets[h];
    draw_.threshold[h] = BudgetThreshold(draw_, h);
  }
}

absl::Status SparseAttend::AddTailOf(const CpuMethod& method) {
  const std::unique_ptr<MethodTail> tail = method.make_tail(keys_, scores_);
  GroupSums sums(group_, c_.spec().head_dim, /*moments=*/false);
  RETURN_IF_ERROR(
      FoldTokens(c_, kv_head_, q_, values_, tail->tokens(), sums, {.weigher = tail.get()}));
  const std::vector<RowSums> exact_alone = exact_.sums;
  exact_.Merge(sums);
  sampled_.push_back(tail->tokens());
  EstimateHeads();
  for (int g = 0; g < group_; ++g) {
    HeadEstimate& e = estimates_[g];
    e.exact_denominator = exact_alone[g].sum * std::exp(double{exact_alone[g].max} - e.max) +
                          std::exp(SinkLogit(g) - e.max);
  }
  return absl::OkStatus();
}

int64_t SparseAttend::DrawnCount() const {
  int64_t drawn = 0;
  for (const auto& tokens : sampled_) drawn += static_cast<int64_t>(tokens.size());
  return drawn;
}

void SparseAttend::WriteOutput() {
  AttendResult& result = *c_.result;
  const int d = c_.spec().head_dim;
  const int64_t drawn = DrawnCount();
  result.touched_row_counts[query_ * c_.spec().group_count() + group_index_] =
      n_ - tail_count_ + drawn;
  for (int g = 0; g < group_; ++g) {
    const int64_t at = query_ * c_.spec().query_head_count + group_index_ * group_ + g;
    const HeadEstimate& e = estimates_[g];
    if (!c_.attend->select_only) {
      for (int i = 0; i < d; ++i) {
        result.out[at * d + i] = static_cast<float>(e.numerator[i] / e.denominator * values_.unit);
      }
      result.lse[at] = static_cast<float>(e.max + std::log(e.denominator));
    }
    HeadCertificate certificate = Certified(g);
    // Attention to a selection does not have the codes' part of the answer.
    if (c_.attend->select_only && codes_ != nullptr && certificate.promise != Promise::kExact) {
      certificate.promise = Promise::kNone;
      certificate.relative_error = HUGE_VALF;
    }
    result.certificates[at] = {.visible_token_count = n_,
                               .heavy_token_count = static_cast<int64_t>(heavy_.size()),
                               .sampled_token_count = drawn,
                               .relative_error = certificate.relative_error,
                               .tail_mass = certificate.tail_mass,
                               .promise = certificate.promise};
  }
}

void SparseAttend::WriteSelection() {
  SelectionBuilder rows;
  for (int64_t t = 0; t < policy_.sink_token_count; ++t) rows.Add(t, kStratumSink);
  for (int64_t t = keys_.end; t < n_; ++t) rows.Add(t, kStratumWindow);
  for (const uint32_t t : heavy_) rows.Add(t, kStratumHeavy);
  for (size_t h = 0; h < sampled_.size(); ++h) {
    rows.AddSampled(sampled_[h], static_cast<int>(h), draw_.drawn[h], strata_.counts[h]);
  }
  c_.result->selections[query_ * c_.spec().group_count() + group_index_] = rows.Build();
}

absl::Status SparseAttend::Run() {
  const std::unique_ptr<KeyScorer> scorer = MakeScorer(keys_);
  RETURN_IF_ERROR(scores_.Score(*scorer));
  End(JobStage::kScore);
  TakeHeavy(*scorer);
  CutTail();
  End(JobStage::kCut);
  std::vector<uint32_t> always(policy_.sink_token_count);
  std::iota(always.begin(), always.end(), 0u);
  always.insert(always.end(), heavy_.begin(), heavy_.end());
  for (int64_t t = keys_.end; t < n_; ++t) always.push_back(static_cast<uint32_t>(t));
  RETURN_IF_ERROR(FoldTokens(c_, kv_head_, q_, values_, always, exact_));
  End(JobStage::kFold);
  if (strata_.size() > 0) {
    RETURN_IF_ERROR(SampleTail(*scorer));
    End(JobStage::kSample);
  } else if (const CpuMethod* method = FindCpuMethod(terms_.tail); method != nullptr) {
    RETURN_IF_ERROR(AddTailOf(*method));
  }
  if (estimates_.empty()) EstimateHeads();
  WriteOutput();
  if (c_.attend->select_only) WriteSelection();
  End(JobStage::kFold);
  return absl::OkStatus();
}

}  // namespace

absl::Status AttendSparse(const AttendContext& context, int64_t query, int group_index,
                          StageClock* clock) {
  RETURN_IF_ERROR(context.Pause());
  if (clock != nullptr) clock->Begin();
  // Workers that wait for a part of this unit must not start another unit, because each unit holds
  // a workspace.
  return Isolated([&] { return SparseAttend(context, query, group_index, clock).Run(); });
}

}  // namespace spillway

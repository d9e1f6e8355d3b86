#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "host/base/limits.h"
#include "host/core/head_estimate.h"
#include "host/core/value_code.h"
#include "host/cpu/kernels.h"
#include "host/cpu/key_scorer.h"
#include "host/cpu/score_pass.h"
#include "host/memory/memory_budget.h"

namespace spillway {

// The answer that codes alone give for the tail of one (query, group), for each query head of the
// group (host/core/value_code.h). Pages are split into tasks of kTaskPages, whatever the number of
// threads. scores and keys must outlive it.
class ValuePass {
 public:
  // value_unit: the unit of all results, a power of two. REQUIRES: scores.levels() is not null, and
  // TakeHeavy() has returned.
  ValuePass(const ScoredKeys& keys, const KeyScorer& scorer, const ScorePass& scores,
            float value_unit);

  // Sums x^ and x^ v^ over the tail, and what codes predict of the rows of each stratum. CANCELLED,
  // RESOURCE_EXHAUSTED.
  absl::Status Sum(const Strata& strata);
  // The sums of a query head.
  CodeSums SumsOf(int head) const;

  // What codes say about a block of at most kRowBlock rows, in memory of the caller.
  struct Block {
    uint8_t levels[kGroupMax * kRowBlock];
    float code_weights[kGroupMax * kRowBlock];
    std::vector<float> centres = std::vector<float>(kRowBlock * kHeadDimMax);
    // Decoding writes a vector beyond the last.
    std::vector<float> codes = std::vector<float>(kRowBlock * kHeadDimMax + 16);
  };
  // Fills a block for tokens of the tail. Thread-safe once Sum() has returned.
  ResidualRows RowsOf(std::span<const uint32_t> tokens, Block& block) const;

 private:
  static constexpr int64_t kTaskPages = 128;
  // Sums over the pages of a task.
  struct TaskSums {
    std::vector<float> centres;  // [G][d] sum of X c: of a page's sum of x^ times its centre
    std::vector<float> codes;    // [G][d] sum of g x^ t, transformed by H
    std::array<double, kGroupMax> centre_squares{};  // sum of X ||c||^2
  };

  const std::byte* PageOf(int64_t page) const { return codes_[page]; }
  const uint8_t* LevelsOf(int64_t page, int head) const {
    return scores_.levels() + (page * group_ + head) * kPageTokenCount;
  }
  const std::byte* FactorsOf(int64_t page) const {
    return PageOf(page) + layout_.value_factor_offset_bytes();
  }
  int64_t task_count() const { return (page_count_ + kTaskPages - 1) / kTaskPages; }
  absl::Status Reserve(int strata);
  absl::Status SumValues();
  absl::Status Predict(const Strata& strata);
  void WeighPages(int64_t begin, int64_t end);
  void SumWeights();
  void SumPages(int64_t begin, int64_t end, TaskSums& sums) const;
  // Adds what codes predict of a token of the tail to sums [G].
  void AddPrediction(int64_t page, int slot, PredictedSums* sums) const;

  const ScoredKeys& keys_;
  const KeyScorer& scorer_;
  const ScorePass& scores_;
  const CodeLayout& layout_;
  const HadamardSigns& signs_;
  const int group_;
  const int dim_;
  const int64_t page_count_;
  const float inverse_unit_;
  MemoryReservation reservation_;        // of the members below, and of the sums of tasks
  std::vector<const std::byte*> codes_;  // index pages
  std::vector<PageWeights> pages_;  // [page][G]; `largest` is 0 if the page's codes are not summed
  std::vector<uint8_t> have_mass_;  // [page] KeyScorer::HasMass()
  std::array<double, kGroupMax> sums_{};  // of x^
  std::vector<double> values_;            // [G][d] sum of x^ v^
  std::vector<double> centres_;           // [G][d] sum of X c
  std::array<double, kGroupMax> centre_squares_{};
  std::vector<PredictedSums> predicted_;  // [stratum][G]
};

}  // namespace spillway

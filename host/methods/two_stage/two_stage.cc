#include "host/methods/two_stage/two_stage.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "host/base/status_macros.h"
#include "host/cpu/cpu_method.h"
#include "host/cpu/score_pass.h"

namespace spillway {
namespace {

// Gives the second selector's bins for the tokens that the first selector finds, and kNotFoundBin
// for all others.
class TwoStageScorer final : public KeyScorer {
 public:
  TwoStageScorer(const ScoredKeys& keys, std::unique_ptr<KeyScorer> second)
      : keys_(keys), second_(std::move(second)) {}

  absl::Status Prepare() override {
    RETURN_IF_ERROR(FindTokens());
    return second_->Prepare();
  }
  int bin_count() const override { return second_->bin_count(); }
  absl::Status Bins(int64_t page, int tile_begin, int tile_end, uint16_t* bins,
                    uint16_t* const* head_bins) const override {
    RETURN_IF_ERROR(second_->Bins(page, tile_begin, tile_end, bins, head_bins));
    const int64_t begin = page * kPageTokenCount + tile_begin * kTileTokenCount;
    const int64_t end = page * kPageTokenCount + tile_end * kTileTokenCount;
    DropOthers(begin, end, bins);
    for (int g = 0; head_bins != nullptr && g < keys_.spec().group(); ++g) {
      DropOthers(begin, end, head_bins[g]);
    }
    return absl::OkStatus();
  }

 private:
  // Scores all keys by the first selector. The workspace of this pass is returned at the end.
  absl::Status FindTokens() {
    const AttendQuery& attend = *keys_.context->attend;
    const std::unique_ptr<KeyScorer> first = MakeScorer(*attend.policy.candidate_selector, keys_);
    ScorePass pass(keys_, *attend.policy.candidate_selector, /*by_mass=*/false);
    RETURN_IF_ERROR(pass.Score(*first));
    found_ = pass.Highest(attend.policy.CandidateCount(attend.visible[keys_.query]));
    return absl::OkStatus();
  }

  // Sets the bins of tokens in [begin, end) that were not found to kNotFoundBin.
  void DropOthers(int64_t begin, int64_t end, uint16_t* bins) const {
    int64_t next = begin;
    for (auto token = std::lower_bound(found_.begin(), found_.end(), begin);
         token != found_.end() && *token < end; ++token) {
      std::fill(bins + (next - begin), bins + (*token - begin), kNotFoundBin);
      next = *token + int64_t{1};
    }
    std::fill(bins + (next - begin), bins + (end - begin), kNotFoundBin);
  }

  const ScoredKeys keys_;
  const std::unique_ptr<KeyScorer> second_;
  std::vector<uint32_t> found_;  // ascending
};

std::unique_ptr<KeyScorer> MakeFirstSelection(const ScoredKeys& keys,
                                              std::unique_ptr<KeyScorer> second) {
  return std::make_unique<TwoStageScorer>(keys, std::move(second));
}

constexpr CpuMethod kCpu = {.make_first_selection = MakeFirstSelection};

}  // namespace

constexpr Method kTwoStageMethod = {.is_first_selection = true, .cpu = &kCpu};

}  // namespace spillway

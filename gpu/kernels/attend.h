#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "gpu/kernels/append.h"
#include "gpu/kernels/code_tiling.h"
#include "gpu/kernels/resident.h"
#include "gpu/kernels/step.h"
#include "host/base/limits.h"
#include "host/base/row_format.h"
#include "host/core/degrees.h"
#include "host/core/estimate.h"
#include "host/core/histogram.h"
#include "host/core/keyed_hash.h"
#include "host/core/page_index.h"
#include "host/core/rank_error.h"
#include "host/core/reference_pages.h"
#include "host/core/selector.h"
#include "host/core/softmax_sums.h"
#include "host/core/tail.h"
#include "host/core/tail_plan.h"
#include "host/core/value_code.h"

// What the kernels of a sparse attend share. The host waits for no result between the kernels:
// counts and budgets stay in UnitState, in GPU memory. Terms:
//   unit       one (query, group); a wave is a set of units with one selector that go through
//              the kernels together
//   group      the G query heads of a KV head; a quartet is four of them, whose bit planes fill
//              two tensor-core instructions
//   page       the rows of kPageTokenCount tokens of one KV head, or their codes with the sections
//              behind them (an index page)
//   tile       the tokens or rows that a block or a warp processes at a time; in code pages 32
//              tokens, divided into octets and fragments (code_tiling.h)
//   segment    kSegmentTokens tokens, which one block filters
//   scored     tokens that have a score: all but sink and window. If scores come from the page
//              index, the open page belongs to the window
//   stray      a scored token with so unusual a key or value that it is always read (page_index.h)
//   reference  the pages whose logits all scores are relative to
//   filtered   tokens that have passed the filter; only these can be listed
//   list       the rows that a unit reads: first the exact rows, then each draw's rows by stratum
//   split      a run of the list that one block folds
//   sample     the rows drawn from the tail: by the pilot, a second and, rarely, a third draw
//   candidate  a token that the first selection found
//   coded unit a unit whose tail is answered by codes, which sampled rows correct
//              (host/core/value_code.h): it has no pilot, and its first draw is that of phase 1
//   span       at most kSpanPages pages of a coded unit, whose codes one block sums. If there are S
//              spans, a span has every S-th page
namespace spillway::cuda {

// Tokens of a segment. The filter keeps their order.
inline constexpr int kSegmentTokens = 4096;
// The class of a bin is its stratum or one of these.
inline constexpr int kClassTie = kTailStrataMax;   // the bin of the heavy threshold
inline constexpr int kClassHeavy = kClassTie + 1;  // all bins above it
inline constexpr int kClassNever = kClassTie + 2;  // no token of the bin is listed
inline constexpr int kClassCount = kClassTie + 3;
// Columns of segment_table, counts of a segment's tokens: 0 heavy, 1 + h drawn from stratum h,
// kMissedColumn all of these whose row is not on the GPU.
inline constexpr int kMissedColumn = 1 + kTailStrataMax;
inline constexpr int kSegmentColumns = kMissedColumn + 1;
// Phases: 0 the exact rows and the pilot, 1 the second draw (by budgets), 2 a third draw if needed.
// Of a coded unit: 0 the exact rows, 1 the first draw (by predicted budgets), 2 a second if needed.
inline constexpr int kPhases = 3;
// Pages of a span, in parts: a warp weighs or sums one part.
inline constexpr int kSpanParts = 8;
inline constexpr int kSpanPages = 32;
// The spans of so many pages: an odd number, so that the reference pages, which take longer, are
// not all in one of them where they are a power of two apart.
SPILLWAY_HOST_DEVICE constexpr int64_t SpanCount(int64_t pages) {
  return ((pages + kSpanPages - 1) / kSpanPages) | 1;
}
// Most strata of a tail, see CutStrata().
inline constexpr int kStrataMax = kStratumEdgeCount + 1;
// Splits of one phase: about kSplitsWanted of at least kSplitRowsMin rows. Each set of rows may add
// a shorter one, because a split has rows of one set only.
inline constexpr int kSplitRowsMin = 32;
inline constexpr int kSplitsWanted = 64;
inline constexpr int kSplitMax = kSplitsWanted + 1 + kTailStrataMax;

// Counts of a segment's tokens in the bin of the heavy threshold (ties).
struct SegmentTies {
  uint32_t all;
  uint32_t drawn;         // those drawn if they are not heavy
  uint32_t all_missed;    // those whose row is not on the GPU
  uint32_t drawn_missed;  // the same of `drawn`
};

// Shapes that all units of a wave share; passed by value.
struct AttendShape {
  DType dtype = DType::kBF16;
  int head_dim = 0;  // d
  int group = 0;     // G
  RowType row_type = RowType::kElements;
  int64_t row_bytes = 0;  // of a stored row
  float scale = 1;        // softmax scale
  Selector selector = Selector::kAsymmetric;
  // Whether bins also depend on the values' distances, and strays have their own: see WeighBin().
  bool weighed = false;
  bool by_mass = false;  // heavy sets by mass (top-p)
  int bin_count = kScoreBinCount;
  CodeTiling tiling;
  int bits_per_dim = 0;
  float quantiser_step = 0;
  double quantiser_distortion = 0;

  SPILLWAY_HOST_DEVICE RowFormat format() const { return {dtype, row_type, head_dim}; }
  bool operator==(const AttendShape&) const = default;
};

// A run of rows of one set: the exact rows (set 0) or stratum set - 1.
struct KvSplit {
  int32_t set = 0;
  int32_t count = 0;
  int64_t first = 0;  // in the unit's list
};

// What the kernels compute about a unit; in GPU memory.
struct UnitState {
  // Query.
  int32_t offset[kGroupMax];
  float coefficient[kGroupMax];
  int32_t reference[kGroupMax];        // M_h as OrderedBits()
  unsigned long long mass[kGroupMax];  // 1 / w_h in fixed point, see ScoreMass()
  double rank_error_scale[kGroupMax];  // RankErrorScale()
  double rank_variance[kGroupMax];     // RankVariance(); 0 if it is not known
  uint32_t heads_totalled;             // heads whose score_sum is set
  double score_sum[kGroupMax];         // sum of RankSums::weight over the pages
  bool reweighed;                      // HeadShares::AreFarApart()
  float head_weight[kGroupMax];        // w_h, if reweighed
  // Heavy set: all bins above the heavy threshold's, and of that bin all tokens (ties) but the
  // first heavy_skip.
  HeavySet heavy_set;
  int64_t heavy_skip;
  int64_t heavy_from;  // ties from this token on are heavy
  unsigned long long heavy_count;
  int32_t tie_class;  // class of the ties that are not heavy
  // By mass: the threshold of each query head, and last that of the strays.
  int32_t head_bin[kGroupMax + 1];
  int64_t head_skip[kGroupMax + 1];
  // Tail.
  int32_t strata;
  int64_t stratum_count[kTailStrataMax];  // n_h
  int32_t drawing;                        // whether the phase draws rows
  int64_t tail_count;
  int64_t rows_left;  // rows that row_count_max leaves for the tail
  int32_t limited;    // whether row_count_max has cut a draw
  // Sampling: tokens with a place (SamplePlace()) below `drawn_threshold` are drawn; the phase adds
  // those below `threshold`.
  uint64_t drawn_threshold[kTailStrataMax];
  uint64_t threshold[kTailStrataMax];
  uint16_t lowest_bin[kTailStrataMax];   // of each stratum, descending
  uint16_t limit_of_class[kClassCount];  // of the current phase, see HashLimit()
  int32_t near_bin;  // below it only tokens of the resident sample pass the filter
  int64_t drawn[kTailStrataMax];
  int64_t head_budget[kGroupMax][kTailStrataMax];
  int64_t budget[kTailStrataMax];  // rows: the pilot's, then those that the bound asks for
  uint32_t heads_done;             // heads that have set their budgets
  uint32_t heads_finished;         // heads that are finished after phase 1
  uint32_t heads_wanting;          // of these, the heads that want rows of phase 2
  // The list: the exact rows, then the drawn rows of each phase by stratum.
  int64_t exact_count;
  int64_t list_count;
  int64_t stratum_first[kTailStrataMax];  // where the phase's draws begin in the list
  int64_t stratum_drawn[kPhases][kTailStrataMax];
  int32_t split_count[kPhases];
  KvSplit splits[kPhases][kSplitMax];
  // Rows that cross the link. The phase gathers gather_count rows to the staging buffer, from its
  // row gather_first on: none if the rows are few, do not fit or belong to the third draw. Then the
  // fold reads them in host memory.
  int64_t moved_count;              // of all phases so far, gathered or not
  unsigned long long shared_count;  // of these, rows that another unit of the wave brings
  int64_t gather_first;
  int64_t gather_count;
  int32_t staged;  // whether the phase's rows are gathered
  // The first token with a logit that is not finite, else kNoToken.
  uint32_t error_token;
};

// Moments from which a wave's stages are timed (gpu/device/stage_times.h): a stage's first kernel
// begins, after all kernels before it have ended.
enum WaveMoment {
  kScoreBegins,
  kCutBegins,
  kPilotBegins,       // the first draw
  kPilotFoldBegins,   // gather and fold of its rows
  kSampleBegins,      // budgets, then the second draw
  kSampleFoldBegins,  // gather and fold of its rows
  kUnitEnds,
};
inline constexpr int kWaveMoments = kUnitEnds + 1;

// What the host reads of a unit; in pinned memory.
struct UnitResult {
  uint32_t error_token = kNoToken;
  int64_t heavy_count = 0;
  int64_t sampled_count = 0;
  int64_t touched_count = 0;
  int64_t moved_count = 0;  // of the touched rows, those that crossed the link
  float lse[kGroupMax] = {};
  HeadCertificate certificates[kGroupMax] = {};
  StepReport report;
  // In ns of the GPU's clock; 0: not reached. All but kUnitEnds only in the wave's first unit.
  uint64_t moments[kWaveMoments] = {};
};
static_assert(kGroupMax <= kStepReportHeads);

// Rows that the units of a wave have brought to staging buffers, by their addresses in host memory:
// a hash table with kSharedRowSlots slots for each unit of the wave.
inline constexpr uint32_t kSharedRowSlots = 2048;
inline constexpr int kSharedRowBytes = 2 * sizeof(void*);  // of a slot
struct SharedRows {
  unsigned long long* keys;  // [slots] addresses; 0: free
  std::byte** places;        // [slots] in a staging buffer; null until it is known
  uint32_t slots;            // 0: no two units of the wave have a row in common
};

// What codes predict of a stratum's rows, for one query head.
struct PredictedPart {
  float of_value;  // see PredictedSums
  float of_centre;
  uint32_t count;
};

// What the codes of a coded unit give for one query head, and behind it value [d] = sum x^ v^ and
// centre [d] = sum x^ c, as floats.
struct CodeTotals {
  double reference;      // sums are in units of exp(reference)
  double sum;            // of x^
  double centre_square;  // sum x^ ||c||^2
  PredictedSums predicted[kStrataMax];
};
SPILLWAY_HOST_DEVICE inline int64_t CodeTotalsBytes(int head_dim) {
  return int64_t{sizeof(CodeTotals)} + int64_t{2} * head_dim * int64_t{sizeof(float)};
}

// Where a coded unit's codes are summed; null otherwise. Pages are numbered from the first of the
// sequence, spans from the first scored page.
struct CodeAnswer {
  uint8_t* levels;  // [pages][G][128], by CodeTiling::factor_index()
  // [pages][G] the largest g x^ over the tail's tokens; 0: the page's codes are not summed.
  float* largest;
  PredictedPart* predicted;  // [spans][kStrataMax][G]
  // [spans][G] of centre [d], sum x^ ||c||^2, sum x^ and two unused, then for each part of
  // the codes their sum [d], in Hadamard's coordinates.
  float* sums;
  std::byte* totals;  // [G] of CodeTotalsBytes()
};
SPILLWAY_HOST_DEVICE inline int64_t SpanFloats(int head_dim, int value_parts) {
  return int64_t{1 + value_parts} * head_dim + 4;
}

// What the host asks of a unit. Pointers are device addresses unless marked otherwise. Made with
// {}, so that fields that are not set are 0.
struct UnitRequest {
  UnitPlace place;
  const std::byte* const* row_pages;  // in GPU memory for whole pages, else pinned
  const std::byte* const* code_pages;
  ResidentRows resident;
  const float* rotation_transposed;  // [d][d], with a rotation
  const HeadStatistics* statistics;  // with a rotation
  const float* sinks;                // [G] sink logits; null: there are none
  float* q;                          // [G][d]
  int64_t n;                         // visible tokens
  int64_t begin;                     // scored tokens [begin, end)
  int64_t end;

  int64_t heavy_count;  // by count or fraction; if adaptive, the minimum
  bool adaptive_heavy;
  // Whether the error of the ranks follows from rank_sums; if not, it is taken as 0.
  bool knows_rank_error;
  double heavy_mass;
  int64_t heavy_floor;
  int64_t heavy_ceiling;
  bool by_mass;
  TailTerms terms;
  ProjectionSigns signs;
  int64_t sink;
  int64_t window;  // tokens [end, n)
  SampleOrder order;

  uint16_t* bins;             // [n], by token; room for whole segments
  uint16_t* head_bins;        // [G][n], by mass only
  uint32_t* histogram;        // [bin_count]
  uint8_t* class_of_bin;      // [bin_count + 2]: of score bins, kNoBin, kHeavyBin
  uint32_t* head_histograms;  // [G][kScoreBinCount], by mass only
  uint32_t* head_ties;        // [G + 1][segments], by mass only
  uint32_t* query_planes;     // [quartets][16][words]
  // [pages][G], `asymmetric` only; set for pages with scored tokens.
  float* centre_logits;        // CentreLogit()
  RankSums<float>* rank_sums;  // sums over the page
  float* reference_logits;     // [G][reference_token_count]
  int64_t reference_token_count;
  uint32_t* filtered;         // [segments][kSegmentTokens], see FilteredToken
  uint32_t* segment_counts;   // [segments] filtered tokens
  SegmentTies* segment_ties;  // [segments]
  uint32_t* segment_table;    // [kSegmentColumns][segments]
  uint32_t* list;             // [n] tokens
  const std::byte** sources;  // [n] addresses where the list's rows are read
  std::byte* staging;         // [staging_rows] rows
  int64_t staging_rows;
  // [staging_rows] rows in host memory, in token order; null: another unit brings the row.
  const std::byte** gather;
  SharedRows shared;
  CodeAnswer codes;
  float* partials;  // [kPhases][kSplitMax][PartialFloats()]
  UnitState* state;
  UnitResult* result;  // pinned
  float* out;          // pinned, [G][d]; null: selection only, or to step.out

  SPILLWAY_HOST_DEVICE int64_t segments() const {
    return (n + kSegmentTokens - 1) / kSegmentTokens;
  }
  // Pages that hold scored tokens: [scored_page_begin, scored_page_end).
  SPILLWAY_HOST_DEVICE int64_t scored_page_begin() const { return begin / kPageTokenCount; }
  SPILLWAY_HOST_DEVICE int64_t scored_page_end() const {
    return (end + kPageTokenCount - 1) / kPageTokenCount;
  }
  SPILLWAY_HOST_DEVICE int64_t spans() const {
    return SpanCount(scored_page_end() - scored_page_begin());
  }
  SPILLWAY_HOST_DEVICE bool coded() const { return codes.levels != nullptr; }
};

// The second moments of projected values are a symmetric matrix. Of its kProjectedPairs entries,
// entry i is that of y_a and y_b, a = i % 16, b = (a + i / 16) % 16. The first 16 are the diagonal.
inline constexpr int kProjectedPairs = kProjectionDims * (kProjectionDims + 1) / 2;

// A split's sums: SoftmaxSums [G], then as floats sum x v and sum x^2 v, [G][d] each, and sum x^2
// y_a y_b [G][kProjectedPairs]. Of exact rows, sums of x^2 are not set. Values are in units of
// HeadStatistics::value_unit. In floats:
inline constexpr int kSumsFloats = sizeof(SoftmaxSums) / sizeof(float);
SPILLWAY_HOST_DEVICE inline int64_t PartialFloats(int group, int head_dim) {
  return int64_t{group} * (kSumsFloats + 2 * head_dim + kProjectedPairs);
}

// What the optional methods of a wave need besides its shape and requests; see
// gpu/methods/request.h. The core only passes it on and compares it.
struct MethodShape;
struct MethodRequest;
struct WaveMethods {
  // The model's, valid while one of its jobs runs; null without a method. The number is unique.
  const MethodShape* shape = nullptr;
  uint64_t model_number = 0;
  // One request per unit, copied from host_units to units before all kernels. 0 bytes: no method of
  // the wave reads requests.
  MethodRequest* host_units = nullptr;  // pinned
  MethodRequest* units = nullptr;       // device
  int64_t request_bytes = 0;            // of all units

  bool operator==(const WaveMethods&) const = default;
};

struct TailKernels;

struct Wave {
  AttendShape shape;
  // The first selection's, if there is one. It differs from `shape` in what concerns scores.
  std::optional<AttendShape> first;
  const UnitRequest* host_units = nullptr;  // pinned
  const float* host_q = nullptr;            // pinned, [units][G][d]; null: step.q is read
  UnitRequest* units = nullptr;             // device; SelectorKernels::prepare fills them
  int unit_count = 0;
  int64_t token_count_max = 0;      // the largest n, rounded up
  int64_t reference_pages_max = 0;  // the largest ReferencePages::count, rounded up
  int sm_count = 0;
  // The most shared memory that a block can have.
  int block_shared_bytes = 0;
  // Whether the GPU has bulk copies (compute capability 9.0).
  bool bulk_copies = false;
  // Blocks of a gather: few, so that the addresses in flight stay close together.
  int gather_blocks = 0;
  // Whether other waves run at once. A gather then takes all the shared memory of its SMs, so that
  // no block of another wave runs there: those were late (docs/adr/0081).
  bool gathers_apart = false;
  // Whether a kernel may begin before the previous one has ended (compute capability 9.0).
  bool overlap = false;
  // Whether the kernel before it on the stream may be that of the append, and not that of another
  // wave, which uses the same workspace.
  bool follows_append = false;
  // Whether any unit has a tail that is sampled; whether any unit is coded, and whether any of the
  // sampled ones is not.
  bool has_tail = false;
  bool has_coded = false;
  bool has_uncoded = false;
  // The kernels that replace the second draw, or null.
  const TailKernels* tail_kernels = nullptr;
  WaveMethods methods;
  // The append before the attends; without rows, none is launched.
  StepAppend append;
  // Where queries come from and outputs go, for a step on a caller's stream.
  CallerTensors step;

  bool operator==(const Wave&) const = default;
};

// Launchers, in the order of an attend. Before them, the wave's selector scores the tokens
// (gpu/kernels/methods.h).
// Heavy sets by mass: finds each head's set and marks the tokens of their union.
cudaError_t LaunchMassSets(const Wave& wave, cudaStream_t stream);
// Of coded units: sums what codes give for the tails, and predicts variances. REQUIRES: phase 0 has
// been drawn.
cudaError_t LaunchCodeSums(const Wave& wave, cudaStream_t stream);
// Most bytes of shared memory that a block needs for it.
size_t CodeSumsSharedBytes(int group);
// Computes the heavy threshold, the strata and the pilot's thresholds.
cudaError_t LaunchCut(const Wave& wave, cudaStream_t stream);
// Draws and lists the rows of a phase: 0 the exact rows and the pilot, 1 what the budgets ask for,
// 2 what heads with too large an error ask for.
cudaError_t LaunchSample(const Wave& wave, int phase, cudaStream_t stream);
// Copies the rows of the phase's list that are in host memory to the staging buffer.
cudaError_t LaunchGather(const Wave& wave, int phase, cudaStream_t stream);
// Computes the sums over each of the phase's splits. Of coded units, those of sampled rows less
// their estimates by codes.
cudaError_t LaunchFold(const Wave& wave, int phase, cudaStream_t stream);
// Computes the budgets of phase 1.
cudaError_t LaunchBudget(const Wave& wave, cudaStream_t stream);
// Compute output and certificate, after the second draw and again after the third.
cudaError_t LaunchFinish(const Wave& wave, cudaStream_t stream);
cudaError_t LaunchFinishAgain(const Wave& wave, cudaStream_t stream);

}  // namespace spillway::cuda

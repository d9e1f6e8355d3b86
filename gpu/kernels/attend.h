#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "gpu/kernels/append.h"
#include "gpu/kernels/code_tiling.h"
#include "gpu/kernels/step.h"
#include "host/base/limits.h"
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

// What the kernels of a sparse attend share. Nothing here waits for the GPU:
// counts and budgets stay in UnitState. What the words mean:
//   unit       one (query, KV head); a wave is units with one selector that go
//              through the kernels together
//   group      the query heads of a KV head, G of them; a quartet is four, whose
//              bit planes two tensor-core instructions hold
//   page       kPageTokenCount tokens of one KV head: of rows, or of codes with
//              what stands behind them (an index page)
//   tile       tokens or rows that a block or a warp takes at a time; 32 in code
//              pages, see code_tiling.h, whose octets and fragments are its parts
//   segment      kSegmentTokens tokens, what one block filters
//   scored     tokens that have a score: neither sink nor window, where the window
//              reaches back over an open page if scores come from the page index
//   stray      a scored token whose estimate says too little (page_index.h)
//   reference  pages whose logits scores are relative to
//   filtered   tokens that the filter lets through, which may be listed
//   list       the unit's rows: exact ones, then each draw's by stratum
//   split      a run of the list, folded by one block
//   sample     the tail's rows, by a first draw (the pilot) and a second
//   candidate  a token that a first selection found
namespace spillway::cuda {

// Tokens of a segment, which stay in order.
inline constexpr int kSegmentTokens = 4096;
// Classes of bins: the stratum, or one of these.
inline constexpr int kClassTie = kTailStrataMax;  // the bin of the heavy threshold
inline constexpr int kClassHeavy = kClassTie + 1;
inline constexpr int kClassNever = kClassTie + 2;
inline constexpr int kClassCount = kClassTie + 3;
// Counters of a segment: heavy tokens, those drawn of each stratum, and how many
// of all these the GPU does not hold.
inline constexpr int kMissedColumn = 1 + kTailStrataMax;
inline constexpr int kSegmentColumns = kMissedColumn + 1;
// Draws: the pilot with the exact rows, the budgets', a third where it is wanted.
inline constexpr int kPhases = 3;
// Parts that one phase's rows are folded in, at most.
inline constexpr int kSplitRowsMin = 32;
inline constexpr int kSplitsWanted = 64;
inline constexpr int kSplitMax = kSplitsWanted + 1 + kTailStrataMax;
inline constexpr uint32_t kNoToken = 0xFFFFFFFFu;

// A segment's tokens in the heavy bin.
struct SegmentTies {
  uint32_t all;
  uint32_t drawn;         // would be drawn if not heavy
  uint32_t all_missed;    // not on the GPU
  uint32_t drawn_missed;  // of those drawn
};

// Shapes that all units of a wave share; passed by value.
struct AttendShape {
  DType dtype = DType::kBF16;
  int head_dim = 0;  // d
  int group = 0;     // G
  int64_t row_bytes = 0;
  float scale = 1;  // softmax scale
  Selector selector = Selector::kAsymmetric;
  // Whether bins take values' distances in, and strays apart: see WeighBin().
  bool weighed = false;
  bool by_mass = false;
  int bin_count = kScoreBinCount;
  CodeTiling tiling;
  int bits_per_dim = 0;
  float quantiser_step = 0;
  double quantiser_distortion = 0;

  bool operator==(const AttendShape&) const = default;
};

// A run of rows of one set: the exact rows (set 0) or stratum set - 1.
struct KvSplit {
  int32_t set = 0;
  int32_t count = 0;
  int64_t first = 0;  // in the unit's list
};

// Which tokens of a page the GPU has rows of, and how many it has of tokens
// before the page.
struct ResidentPage {
  uint32_t mask[kPageTokenCount / 32];
  uint32_t before;
  uint32_t unused;
};
inline constexpr int kResidentPageRows = 64;
// The first tokens, whose rows the GPU always holds.
inline constexpr int kResidentSink = 64;
// Rows of a ring of the newest tokens, by token % kRecentRows.
inline constexpr int kRecentRows = 128;

// Rows of one KV head that lie in GPU memory. Null pages: none of the sample.
struct ResidentRows {
  const ResidentPage* pages;          // of every page of tokens that are indexed
  const std::byte* const* row_pages;  // kResidentPageRows rows each, by token
  int64_t sink;                       // tokens [0, sink) are all there
  const std::byte* recent;            // ring [kRecentRows] of rows
  int64_t recent_begin;               // tokens from here on are in the ring
  // Tokens [0, whole_end) are there whatever the rest says: those of page p at
  // whole_pages[p].
  const std::byte* const* whole_pages;
  int64_t whole_end;
};

// What the kernels find out about a unit.
struct UnitState {
  // Query.
  int32_t offset[kGroupMax];
  float coefficient[kGroupMax];
  int32_t reference[kGroupMax];  // M_h as an ordered integer
  unsigned long long mass[kGroupMax];
  double rank_error_scale[kGroupMax];  // RankErrorScale()
  double rank_variance[kGroupMax];     // RankVariance(); 0 where it is not known
  uint32_t heads_totalled;             // that have the following
  double score_sum[kGroupMax];         // sum of RankSums::weight
  bool reweighed;                      // HeadShares::AreFarApart()
  float head_weight[kGroupMax];        // then w_h
  // Heavy set: bins above, and of the bin itself all but the first skip.
  HeavySet heavy_set;
  int64_t heavy_skip;
  int64_t heavy_from;  // tokens of the bin from here on are heavy
  unsigned long long heavy_count;
  int32_t tie_class;  // of the bin's tokens that are not heavy
  // By mass: per query head, and as one more the strays.
  int32_t head_bin[kGroupMax + 1];
  int64_t head_skip[kGroupMax + 1];
  // Tail.
  int32_t strata;
  int64_t stratum_count[kTailStrataMax];  // n_h
  int32_t drawing;                        // whether the phase draws anything
  int64_t tail_count;
  int64_t rows_left;  // that row_count_max leaves for the tail
  int32_t limited;    // row_count_max bound
  // Sampling: drawn are hashes below `drawn_threshold`; a phase adds those
  // below `threshold`.
  uint64_t drawn_threshold[kTailStrataMax];
  uint64_t threshold[kTailStrataMax];
  uint16_t lowest_bin[kTailStrataMax];   // of a stratum; they descend
  uint16_t limit_of_class[kClassCount];  // of the phase, see HashLimit()
  int32_t near_bin;  // below it the filter lets through the resident sample's tokens alone
  int64_t drawn[kTailStrataMax];
  int64_t head_budget[kGroupMax][kTailStrataMax];
  int64_t budget[kTailStrataMax];  // of the pilot, then what the bound asks for
  uint32_t heads_done;             // that have set their budgets
  uint32_t heads_finished;         // after the second draw
  uint32_t heads_wanting;          // of these, those that want a third
  // Rows: the list holds the exact rows, then each phase's draws by stratum.
  int64_t exact_count;
  int64_t list_count;
  int64_t stratum_first[kTailStrataMax];  // of the phase's draws, in the list
  int64_t stratum_drawn[kPhases][kTailStrataMax];
  int32_t split_count[kPhases];
  KvSplit splits[kPhases][kSplitMax];
  // The phase's rows that come over the link, and where in the staging they
  // go; 0 of them if they do not fit and are read where they lie.
  int64_t moved_count;  // of the phases so far, gathered or not
  int64_t gather_first;
  int64_t gather_count;
  int32_t staged;
  // The first token with a logit that is not finite.
  uint32_t error_token;
};

// Moments of a wave, by which its stages are timed (gpu/device/stage_times.h): when a stage's first
// kernel begins, all before it having ended.
enum WaveMoment {
  kScoreBegins,
  kCutBegins,
  kPilotBegins,       // the first draw
  kPilotFoldBegins,   // its rows are brought and summed up
  kSampleBegins,      // the second draw: budgets first
  kSampleFoldBegins,  // its rows
  kUnitEnds,
};
inline constexpr int kWaveMoments = kUnitEnds + 1;

// What the host reads of a unit; lies in pinned memory.
struct UnitResult {
  uint32_t error_token = kNoToken;
  int64_t heavy_count = 0;
  int64_t sampled_count = 0;
  int64_t touched_count = 0;
  int64_t moved_count = 0;  // of those, rows that came over the link
  float lse[kGroupMax] = {};
  HeadCertificate certificates[kGroupMax] = {};
  StepReport report;
  // By the GPU's clock, ns; 0: not reached. But for kUnitEnds of the wave's first unit alone.
  uint64_t moments[kWaveMoments] = {};
};
static_assert(kGroupMax <= kStepReportHeads);

// What the host asks of a unit. Pointers are device addresses but where they
// say otherwise. Made with {}, so that what is not set is 0.
struct UnitRequest {
  UnitPlace place;
  const std::byte* const* row_pages;  // in GPU memory where whole pages are
  const std::byte* const* code_pages;
  ResidentRows resident;
  const float* rotation_transposed;  // [d][d], with a rotation
  const HeadStatistics* statistics;  // with a rotation
  float* q;                          // [G][d]
  int64_t n;                         // visible tokens
  int64_t begin;                     // scored tokens [begin, end)
  int64_t end;

  int64_t heavy_count;  // by count or fraction; adaptive: at least
  bool adaptive_heavy;
  // Whether rank_sums tell how far off the ranks are; else 0 is taken.
  bool knows_rank_error;
  double heavy_mass;
  int64_t heavy_floor;
  int64_t heavy_ceiling;
  bool by_mass;
  TailTerms terms;
  ProjectionSigns signs;
  int64_t sink;
  int64_t window;  // from end on
  SampleOrder order;

  uint16_t* bins;             // [n], by token
  uint16_t* head_bins;        // [G][n], by mass only
  uint32_t* histogram;        // [bin_count]
  uint8_t* class_of_bin;      // [bin_count + 2]: bins, then kNoBin and kHeavyBin
  uint32_t* head_histograms;  // [G][kScoreBinCount], by mass only
  uint32_t* head_ties;        // [G + 1][segments], by mass only
  uint32_t* query_planes;     // [quartets][16][words]
  // [pages][G], `asymmetric` only; of pages with scored tokens.
  float* centre_logits;        // CentreLogit()
  RankSums<float>* rank_sums;  // over the page
  float* reference_logits;     // [G][reference_token_count]
  int64_t reference_token_count;
  uint32_t* filtered;         // [segments][kSegmentTokens], see FilteredToken
  uint32_t* segment_counts;   // [segments] filtered tokens
  SegmentTies* segment_ties;  // [segments]
  uint32_t* segment_table;    // [kSegmentColumns][segments]
  uint32_t* list;             // [n] tokens
  const std::byte** sources;  // [n] where the list's rows are read
  std::byte* staging;         // [staging_rows] rows
  int64_t staging_rows;
  const std::byte** gather;  // [staging_rows] rows in host memory, by address
  float* partials;           // [kPhases][kSplitMax] of PartialFloats()
  UnitState* state;
  UnitResult* result;  // pinned
  float* out;          // pinned, [G][d]; null: selection only, or to a tensor

  SPILLWAY_HOST_DEVICE int64_t segments() const {
    return (n + kSegmentTokens - 1) / kSegmentTokens;
  }
  // Pages that hold scored tokens: [scored_page_begin, scored_page_end).
  SPILLWAY_HOST_DEVICE int64_t scored_page_begin() const { return begin / kPageTokenCount; }
  SPILLWAY_HOST_DEVICE int64_t scored_page_end() const {
    return (end + kPageTokenCount - 1) / kPageTokenCount;
  }
};

// The second moments of projected values are symmetric: entry i of
// kProjectedPairs is of y_a and y_b, a = i % 16, b = (a + i / 16) % 16. The first
// 16 are the diagonal.
inline constexpr int kProjectedPairs = kProjectionDims * (kProjectionDims + 1) / 2;

// A split's sums: SoftmaxSums [G], then as floats sum x v and sum x^2 v, [G][d]
// each, and sum x^2 y_a y_b, [G][kProjectedPairs]; values in units of
// HeadStatistics::value_unit. In floats:
inline constexpr int kSumsFloats = sizeof(SoftmaxSums) / sizeof(float);
SPILLWAY_HOST_DEVICE inline int64_t PartialFloats(int group, int head_dim) {
  return int64_t{group} * (kSumsFloats + 2 * head_dim + kProjectedPairs);
}

// What the methods of a wave need beside its shape and requests; see
// gpu/methods/request.h. The core passes it on and compares it.
struct MethodShape;
struct MethodRequest;
struct WaveMethods {
  // Of the model, valid while a job of the model runs; the number is no other
  // model's. Null without a method.
  const MethodShape* shape = nullptr;
  uint64_t model_number = 0;
  // A request a unit, copied from pinned memory before all kernels; 0 bytes:
  // no method of the wave reads one.
  MethodRequest* host_units = nullptr;  // pinned
  MethodRequest* units = nullptr;       // device
  int64_t request_bytes = 0;            // of all

  bool operator==(const WaveMethods&) const = default;
};

struct TailKernels;

struct Wave {
  AttendShape shape;
  // Of the first selection, if there is one: differs in what concerns scores.
  std::optional<AttendShape> first;
  const UnitRequest* host_units = nullptr;  // pinned
  const float* host_q = nullptr;            // pinned, [units][G][d]; null: step.q
  UnitRequest* units = nullptr;             // device, filled by LaunchPrepareQuery
  int unit_count = 0;
  int64_t token_count_max = 0;      // the largest n
  int64_t reference_pages_max = 0;  // the largest ReferencePages::count
  int sm_count = 0;
  // Shared memory that a block can have.
  int block_shared_bytes = 0;
  // Whether the GPU has bulk copies (compute capability 9.0).
  bool bulk_copies = false;
  // Blocks that gather rows: few, so that the addresses in flight stay close.
  int gather_blocks = 0;
  // Whether kernels may begin before those before them have ended (9.0).
  bool overlap = false;
  // Whether a unit draws from its tail.
  bool has_tail = false;
  // The kernels that sample in place of the second draw; null: none do.
  const TailKernels* tail_kernels = nullptr;
  WaveMethods methods;
  // What is appended before the attends; no row: nothing.
  StepAppend append;
  // Where queries come from and outputs go, for a step on a caller's stream.
  CallerTensors step;

  bool operator==(const Wave&) const = default;
};

// Launchers, in the order of an attend. Before these the wave's selector has
// scored its tokens, see kernels/methods.h.
// By mass: finds each head's set and marks the union's tokens.
cudaError_t LaunchMassSets(const Wave& wave, cudaStream_t stream);
// The heavy threshold, the strata and the pilot's thresholds.
cudaError_t LaunchCut(const Wave& wave, cudaStream_t stream);
// Draws and lists the rows of a phase: 0 the exact rows and the pilot, 1 what the
// budgets ask for, 2 what heads ask for whose error came out too large.
cudaError_t LaunchSample(const Wave& wave, int phase, cudaStream_t stream);
// Copies what the phase's list has of rows in host memory to the staging.
cudaError_t LaunchGather(const Wave& wave, int phase, cudaStream_t stream);
// Sums over the phase's splits.
cudaError_t LaunchFold(const Wave& wave, int phase, cudaStream_t stream);
// The budgets of phase 1.
cudaError_t LaunchBudget(const Wave& wave, cudaStream_t stream);
// Output and certificate, after the second draw and again after the third.
cudaError_t LaunchFinish(const Wave& wave, cudaStream_t stream);
cudaError_t LaunchFinishAgain(const Wave& wave, cudaStream_t stream);

// ---- Dense attends -------------------------------------------------------

inline constexpr int kDenseQueryRows = 16;  // (query, head of the group) pairs

// What the host reads of a dense unit; lies in pinned memory.
struct DenseResult {
  uint32_t error_token = kNoToken;
  StepReport report;  // its heads are query rows
};
static_assert(kDenseQueryRows <= kStepReportHeads);

// Up to kDenseQueryRows query rows of one KV head over all their rows.
struct DenseUnit {
  UnitPlace place{};  // of the first query
  const std::byte* const* row_pages = nullptr;
  const float* q = nullptr;  // [rows][d], rows = queries * G; null: the wave's step.q
  int32_t query_rows = 0;
  int64_t visible[kDenseQueryRows] = {};  // per query row
  int64_t n = 0;                          // the largest
  int64_t split_rows = 0;
  int64_t split_count = 0;
  float* partials = nullptr;  // [split_count] of query_rows * (2 + d) floats
  uint32_t* error_token = nullptr;
  float* out = nullptr;           // pinned, [query_rows][d]; null: to the wave's step.out
  float* lse = nullptr;           // pinned, [query_rows]
  DenseResult* result = nullptr;  // pinned
};

struct DenseWave {
  DType dtype = DType::kBF16;
  int head_dim = 0;
  int group = 0;
  int64_t row_bytes = 0;
  float scale = 1;
  const DenseUnit* units = nullptr;  // device
  int unit_count = 0;
  // Rows [first, limit) are folded by this launch, and page 0 of the units'
  // tables holds row first; a multiple of their splits, or all rows.
  int64_t first = 0;
  int64_t limit = 0;
  int64_t split_count_max = 0;  // of one launch
  // Not 0 stops the work; pinned.
  const int32_t* cancel = nullptr;
  CallerTensors step;

  bool operator==(const DenseWave&) const = default;
};

// Copies pages of rows next to each other: page p of head h from
// from[h * capacity + p] to to + (h * page_count + p) * page_bytes.
cudaError_t LaunchStagePages(const std::byte* const* from, int64_t capacity, int head_count,
                             int64_t page_count, int64_t page_bytes, std::byte* to,
                             cudaStream_t stream);
cudaError_t LaunchDenseFold(const DenseWave& wave, cudaStream_t stream);
cudaError_t LaunchDenseFinish(const DenseWave& wave, cudaStream_t stream);

}  // namespace spillway::cuda

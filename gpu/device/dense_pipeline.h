#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gpu/device/carver.h"
#include "gpu/device/job_context.h"
#include "gpu/kernels/dense.h"

namespace spillway::cuda {

// The queries of a job that use exact attention. Add() plans them and Reserve() measures them. Then
// come Prepare(), Launch() and, once the GPU is done, Collect().
class DensePipeline {
 public:
  explicit DensePipeline(JobContext* context) : context_(context) {}

  // Forgets all queries and keeps the memory, for the next announcement of the layer.
  void Clear();
  // Adds queries [begin, end) of an item. Fills in the results that are known already.
  void Add(size_t item, int64_t begin, int64_t end);
  bool empty() const { return parts_.empty(); }
  // Takes the pinned memory of all parts from carvers that only measure: requests, which the GPU
  // reads, and results, which it writes. Returns the bytes of the workspace, which parts use one
  // after the other.
  int64_t Reserve(Carver& requests, Carver& results);
  // Lays out all parts and writes the requests.
  void Prepare(Carver& requests, Carver& results, std::byte* workspace);
  absl::Status Launch(cudaStream_t stream);
  // For a step that has no other attends: if all queries are in one part, lets the launch of the
  // append clear() the part's words, so that nothing else comes between append and fold.
  void FollowAppend() { follows_append_ = parts_.size() == 1; }
  // Words that the append sets to kNoToken; empty if Launch() does, or other attends come between.
  std::span<uint32_t> clear() const;
  // The parts as a step launches them. A captured graph depends on nothing else.
  std::vector<DenseWave> Views() const;
  // Sets the results and statuses of the items.
  void Collect() const;

 private:
  // Up to kDenseQueryRows query rows of a group.
  struct Block {
    size_t item;
    int64_t begin;  // queries [begin, end)
    int64_t end;
    int group_index;
    int kv_head;  // of the group
    DenseUnit unit;
  };
  // Blocks that the kernels process together.
  struct Part {
    std::vector<Block> blocks;
    // Rows are copied to the GPU for all blocks together, one stage at a time.
    bool staged = false;
    bool by_warps = false;       // DenseByWarps() of all blocks, if rows are read in place
    int64_t row_count = 0;       // of a KV head, over the blocks' sequences
    int64_t host_row_count = 0;  // those of them that are not in GPU memory
    int64_t split_count = 0;
    int64_t partial_bytes = 0;
    // In pinned memory. The first three are copied to the workspace together.
    DenseUnit* units = nullptr;
    float* q = nullptr;
    const std::byte** stage_table = nullptr;
    int64_t request_bytes = 0;
    float* out = nullptr;
    float* lse = nullptr;
    DenseResult* results = nullptr;
    // In the workspace; the first three as in pinned memory.
    DenseUnit* device_units = nullptr;
    float* device_q = nullptr;
    const std::byte** device_stage_table = nullptr;
    std::byte* stage = nullptr;
    uint32_t* errors = nullptr;  // of each block; then DenseWave::running
  };

  const ModelSpec& spec() const { return context_->spec(); }
  // Bytes of one stage of a KV head's rows.
  int64_t StageBytes() const;
  // The number of splits of a unit of n tokens. It does not fall when n grows.
  static int64_t SplitsOf(int64_t n, bool staged);
  // Most bytes of the sums of a part's splits, unless one run of queries takes more.
  int64_t PartialBytesMax() const;
  // The splits to make room for: in a step, those of its capacity, so that its memory does not
  // depend on the length.
  int64_t RoomOf(int64_t n, bool staged) const;
  // Lays out a part. Empty carvers only measure.
  void LayOut(Part& part, Carver& requests, Carver& results, Carver& workspace) const;
  // Writes the requests of a part that was laid out.
  void Fill(Part& part) const;
  DenseWave View(const Part& part) const;
  absl::Status Launch(const Part& part, cudaStream_t stream);
  absl::Status Fold(const Part& part, DenseWave wave, cudaStream_t stream);
  void Collect(const Part& part) const;

  JobContext* const context_;
  std::vector<Part> parts_;
  std::vector<std::vector<Block>> spare_;  // empty, with memory for blocks
  bool follows_append_ = false;
};

}  // namespace spillway::cuda

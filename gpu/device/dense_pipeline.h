#pragma once

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gpu/device/carver.h"
#include "gpu/device/job_context.h"

namespace spillway::cuda {

// A job's queries that are attended exactly: one after the other planned by
// Add(), measured by Reserve(), prepared, launched and, once the GPU is done,
// collected.
class DensePipeline {
 public:
  explicit DensePipeline(JobContext* context) : context_(context) {}

  // Queries [begin, end) of an item. Fills in what is known of them already.
  void Add(size_t item, int64_t begin, int64_t end);
  bool empty() const { return parts_.empty(); }
  // Takes the pinned memory of all from carvers that only measure: what the GPU
  // reads, and what it writes. Returns the bytes of the workspace, which parts
  // have one after the other.
  int64_t Reserve(Carver& requests, Carver& results);
  // Lays everything out and writes the requests.
  void Prepare(Carver& requests, Carver& results, std::byte* workspace);
  absl::Status Launch();
  // The parts as a step launches them: what can be captured depends on them alone.
  std::vector<DenseWave> Views() const;
  // Results and statuses of the items.
  void Collect() const;

 private:
  // Up to kDenseQueryRows query rows of a KV head.
  struct Block {
    size_t item;
    int64_t begin;  // queries [begin, end)
    int64_t end;
    int kv_head;
    DenseUnit unit;
  };
  // Blocks that go through the kernels together.
  struct Part {
    std::vector<Block> blocks;
    // Rows are brought over for all blocks together, a stage at a time.
    bool staged = false;
    int64_t partial_bytes = 0;
    // Pinned. The first three are copied to the workspace as one.
    DenseUnit* units = nullptr;
    float* q = nullptr;
    const std::byte** stage_table = nullptr;
    int64_t request_bytes = 0;
    float* out = nullptr;
    float* lse = nullptr;
    DenseResult* results = nullptr;
    // In the workspace, the first three as in pinned memory.
    DenseUnit* device_units = nullptr;
    float* device_q = nullptr;
    const std::byte** device_stage_table = nullptr;
    std::byte* stage = nullptr;
    uint32_t* errors = nullptr;
  };

  const ModelSpec& spec() const { return context_->spec(); }
  // Bytes of the rows of a KV head that are staged at a time.
  int64_t StageBytes() const;
  // Splits of a unit of n tokens: rows of one, and how many.
  static std::pair<int64_t, int64_t> SplitsOf(int64_t n, bool staged);
  // Lays a part out; with empty carvers only measures.
  void LayOut(Part& part, Carver& requests, Carver& results, Carver& workspace) const;
  // Writes the requests of a part that is laid out.
  void Fill(Part& part) const;
  DenseWave View(const Part& part) const;
  absl::Status Launch(const Part& part);
  absl::Status Fold(const Part& part, DenseWave wave);
  void Collect(const Part& part) const;

  JobContext* const context_;
  std::vector<Part> parts_;
};

}  // namespace spillway::cuda

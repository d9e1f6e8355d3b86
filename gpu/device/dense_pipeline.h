#pragma once

#include <vector>

#include "absl/status/status.h"
#include "gpu/device/carver.h"
#include "gpu/device/job_context.h"

namespace spillway::cuda {

// A job's queries that are attended exactly: one after the other planned by
// Add(), measured by Reserve(), enqueued and, once the GPU is done, collected.
class DensePipeline {
 public:
  explicit DensePipeline(JobContext* context) : context_(context) {}

  // Queries [begin, end) of an item. Fills in what is known of them already.
  void Add(size_t item, int64_t begin, int64_t end);
  // Takes the pinned memory of all from a carver that only measures. Returns the
  // bytes of the workspace, which parts have one after the other.
  int64_t Reserve(Carver& pinned);
  absl::Status Enqueue(Carver& pinned, std::byte* workspace);
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
    // Pinned.
    DenseUnit* units = nullptr;
    float* q = nullptr;
    const std::byte** stage_table = nullptr;
    float* out = nullptr;
    float* lse = nullptr;
    uint32_t* errors = nullptr;
  };
  // What of a part lies in the workspace. The first three lie as in pinned
  // memory, copied from there as one.
  struct PartMemory {
    DenseUnit* units = nullptr;
    float* q = nullptr;
    const std::byte** stage_table = nullptr;
    int64_t request_bytes = 0;
    std::byte* stage = nullptr;
    uint32_t* errors = nullptr;
  };

  const ModelSpec& spec() const { return context_->spec(); }
  // Bytes of the rows of a KV head that are staged at a time.
  int64_t StageBytes() const;
  // Lays a part out; with empty carvers only measures.
  PartMemory LayOut(Part& part, Carver& pinned, Carver& workspace) const;
  // Writes the requests of a part that is laid out.
  void Fill(Part& part, const PartMemory& memory) const;
  absl::Status Launch(const Part& part, const PartMemory& memory);
  absl::Status Fold(const Part& part, const PartMemory& memory, DenseWave wave);
  void Collect(const Part& part) const;

  JobContext* const context_;
  std::vector<Part> parts_;
};

}  // namespace spillway::cuda

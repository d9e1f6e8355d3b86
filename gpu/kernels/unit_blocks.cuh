#pragma once

#include <cooperative_groups.h>

// Blocks that work on one unit and hear from each other: a cluster (compute capability 9.0), else
// one block alone.
namespace spillway::cuda {

inline constexpr int kUnitBlocksMax = 16;

struct UnitBlocks {
#if __CUDA_ARCH__ >= 900
  __device__ int rank() const {
    return static_cast<int>(cooperative_groups::this_cluster().block_rank());
  }
  __device__ int count() const {
    return static_cast<int>(cooperative_groups::this_cluster().num_blocks());
  }
  // What block `rank` has in its shared memory where this one has `own`.
  template <typename T>
  __device__ const T* Of(const T* own, int rank) const {
    return cooperative_groups::this_cluster().map_shared_rank(own, rank);
  }
  // All threads of all blocks: what each has written is seen by the others after.
  __device__ void Sync() const { cooperative_groups::this_cluster().sync(); }
  // The same in two: what a block does between takes no part. A block's shared memory can be read
  // until it has passed the last.
  __device__ void Arrive() const { cooperative_groups::this_cluster().barrier_arrive(); }
  __device__ void Wait() const { cooperative_groups::this_cluster().barrier_wait(); }
#else
  __device__ int rank() const { return 0; }
  __device__ int count() const { return 1; }
  template <typename T>
  __device__ const T* Of(const T* own, int) const {
    return own;
  }
  __device__ void Sync() const { __syncthreads(); }
  __device__ void Arrive() const {}
  __device__ void Wait() const {}
#endif
};

}  // namespace spillway::cuda

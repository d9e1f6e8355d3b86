#pragma once

#include <cstdint>

namespace spillway {

// How a GPU's memory for workspaces is shared out between jobs and steps on a stream.
struct WorkspaceShares {
  // Explicit totals are at least this.
  static constexpr int64_t kTotalMin = int64_t{16} << 20;

  // Jobs of one kind that run at the same time. Two, so that rows of one job cross the link while
  // the other is scored; but one if memory is scarce, because each has a workspace.
  int slots_of_kind = 1;
  // Most bytes of a job's workspace for the units of one wave.
  int64_t wave_bytes = 0;
  // The same for a step on a stream, which may run two waves at a time. The waves of a step that
  // has no room for all its units run one after the other, and each takes nearly as long as all
  // units together. Exact attends that run beside its other ones take up to half as much besides,
  // and mostly far less.
  int64_t step_bytes = 0;
  // What codes and copies of rows leave to workspaces, so that sequences that fill the rest can be
  // attended to.
  int64_t total_bytes = 0;

  // memory_limit_bytes: of the GPU. has_copies: whether there may be copies of rows; then exact
  // attends of a step run beside its other ones and have a workspace of their own, half as large.
  // total_bytes: as asked for; 0: by the memory.
  static WorkspaceShares Of(int64_t memory_limit_bytes, bool has_copies, int64_t total_bytes);
};

}  // namespace spillway

// What a job's items get once the GPU is done.
#include <algorithm>
#include <memory>

#include "gpu/device/job_run.h"
#include "host/device/errors.h"
#include "host/device/results.h"

namespace spillway::cuda {

absl::Status JobRun::CollectSelections(const SparseWave& wave) {
  SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(slot_->stream()));
  auto state = std::make_unique<UnitState>();
  std::vector<uint32_t> list;
  for (size_t i = 0; i < wave.units.size(); ++i) {
    const SparseUnit& unit = wave.units[i];
    const UnitRequest& r = wave.requests[i];
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(state.get(), r.state, sizeof(UnitState),
                                                  cudaMemcpyDeviceToHost, slot_->stream()));
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(slot_->stream()));
    list.resize(static_cast<size_t>(state->list_count));
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(list.data(), r.list,
                                                  sizeof(uint32_t) * list.size(),
                                                  cudaMemcpyDeviceToHost, slot_->stream()));
    SPILLWAY_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(slot_->stream()));

    SelectionBuilder rows;
    for (int64_t j = 0; j < state->exact_count; ++j) {
      rows.Add(list[j], j < r.sink                           ? kStratumSink
                        : j >= state->exact_count - r.window ? kStratumWindow
                                                             : kStratumHeavy);
    }
    int64_t at = state->exact_count;
    for (const int phase : {0, 1}) {
      for (int h = 0; h < state->strata; ++h) {
        const int64_t count = state->stratum_drawn[phase][h];
        rows.AddSampled({list.data() + at, static_cast<size_t>(count)}, h, state->drawn[h],
                        state->stratum_count[h]);
        at += count;
      }
    }
    job_->items[unit.item].result.selections[unit.query * spec().kv_head_count + unit.kv_head] =
        rows.Build();
  }
  return absl::OkStatus();
}

void JobRun::Collect(const SparseWave& wave) {
  const int heads = spec().kv_head_count;
  const int group = spec().group();
  const int d = spec().head_dim;
  for (size_t i = 0; i < wave.units.size(); ++i) {
    const auto [index, query, kv_head] = wave.units[i];
    JobItem& item = job_->items[index];
    AttendResult& result = item.result;
    const UnitResult& r = wave.results[i];
    if (r.error_token != kNoToken) {
      item.status.Update(NonFiniteLogitError(r.error_token, job_->layer, kv_head));
      continue;
    }
    result.moved_row_count += r.moved_count;
    result.touched_row_counts[query * heads + kv_head] = r.touched_count;
    for (int g = 0; g < group; ++g) {
      const int64_t at = query * spec().query_head_count + kv_head * group + g;
      Certificate& c = result.certificates[at];
      c.visible_token_count = item.attend->visible[query];
      c.heavy_token_count = r.heavy_count;
      c.sampled_token_count = r.sampled_count;
      c.relative_error = r.certificates[g].relative_error;
      c.tail_mass = r.certificates[g].tail_mass;
      c.promise = r.certificates[g].promise;
      if (item.attend->select_only) continue;
      std::copy_n(wave.out + (static_cast<int64_t>(i) * group + g) * d, d,
                  result.out.data() + at * d);
      result.lse[at] = r.lse[g];
    }
  }
}

void JobRun::Collect(const DensePart& part) {
  const int group = spec().group();
  const int d = spec().head_dim;
  for (size_t i = 0; i < part.blocks.size(); ++i) {
    const DenseBlock& block = part.blocks[i];
    JobItem& item = job_->items[block.item];
    AttendResult& result = item.result;
    if (part.errors[i] != kNoToken) {
      item.status.Update(NonFiniteLogitError(part.errors[i], job_->layer, block.kv_head));
      continue;
    }
    for (int r = 0; r < block.unit.query_rows; ++r) {
      const int64_t at =
          (block.begin + r / group) * spec().query_head_count + block.kv_head * group + r % group;
      const int64_t from = static_cast<int64_t>(i) * kDenseQueryRows + r;
      std::copy_n(part.out + from * d, d, result.out.data() + at * d);
      result.lse[at] = part.lse[from];
    }
  }
}

void JobRun::Collect() {
  for (const SparseWave& wave : waves_) Collect(wave);
  for (const DensePart& part : dense_) Collect(part);
  float milliseconds = 0;
  if (cudaEventElapsedTime(&milliseconds, slot_->start(), slot_->done()) == cudaSuccess) {
    job_->device_time_us = 1000.0 * milliseconds;
  }
  cudaEvent_t before = slot_->start();
  for (const auto& [name, event] : marks_) {
    cudaEventElapsedTime(&milliseconds, before, event.get());
    job_->stages.push_back({name, 1000.0 * milliseconds});
    before = event.get();
  }
}

}  // namespace spillway::cuda

#include "gpu/device/wave_kernels.h"

#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "gpu/kernels/methods.h"
#include "host/policy/methods.h"

namespace spillway::cuda {

namespace {

bool IsScored(Selector selector) {
  return selector == Selector::kAll || FindSelectorKernels(selector) != nullptr;
}

}  // namespace

absl::Status CheckServed(const Policy& policy, std::string_view device) {
  const auto missing = [&](const std::string& what) {
    return absl::UnimplementedError(
        absl::StrCat(what, " is not implemented on ", std::string(device)));
  };
  if (!IsScored(policy.selector)) return missing(ApiName(policy.selector));
  if (const std::optional<Selector> first = policy.candidate_selector) {
    if (!IsScored(*first)) return missing(ApiName(*first));
    if (BuiltMethods().first_selection == nullptr) return missing("a first selection");
  }
  if (!IsSampled(policy.tail)) return missing(ApiName(policy.tail));
  return absl::OkStatus();
}

absl::Status LaunchWave(const Wave& wave, JobContext& context, cudaEvent_t scored) {
  cudaStream_t stream = context.stream();
  absl::Status status = context.Mark("begin");
  const auto stage = [&](std::string_view name, cudaError_t error) {
    if (status.ok()) status = ToStatus(error, name);
    if (status.ok()) status = context.Mark(name);
  };
  if (wave.append.row_count > 0) stage("append", LaunchStepAppend(wave.append, stream));
  if (wave.first) {
    Wave first = wave;
    first.shape = *wave.first;
    first.first.reset();
    const SelectorKernels& kernels = *FindSelectorKernels(first.shape.selector);
    stage("first query", kernels.prepare(first, stream));
    stage("first reference", kernels.reference(first, stream));
    stage("first score", kernels.score(first, stream));
    stage("candidates", BuiltMethods().first_selection->find(first, stream));
  }
  const SelectorKernels& kernels = *FindSelectorKernels(wave.shape.selector);
  stage("query", kernels.prepare(wave, stream));
  stage("reference", kernels.reference(wave, stream));
  stage("score", kernels.score(wave, stream));
  if (scored != nullptr && status.ok()) {
    status = ToStatus(cudaEventRecord(scored, stream), "cudaEventRecord");
  }
  if (wave.first) stage("drop", BuiltMethods().first_selection->drop_others(wave, stream));
  if (wave.shape.by_mass) stage("mass", LaunchMassSets(wave, stream));
  stage("cut", LaunchCut(wave, stream));
  stage("pilot", LaunchSample(wave, 0, stream));
  if (wave.has_coded) stage("code sums", LaunchCodeSums(wave, stream));
  stage("pilot gather", LaunchGather(wave, 0, stream));
  stage("pilot fold", LaunchFold(wave, 0, stream));
  if (wave.tail_kernels != nullptr) {
    stage(wave.tail_kernels->stage, wave.tail_kernels->sample(wave, stream));
    stage("sample fold", wave.tail_kernels->fold(wave, stream));
  } else if (wave.has_tail) {
    stage("budget", LaunchBudget(wave, stream));
    stage("sample", LaunchSample(wave, 1, stream));
    stage("sample gather", LaunchGather(wave, 1, stream));
    stage("sample fold", LaunchFold(wave, 1, stream));
  }
  stage("finish", LaunchFinish(wave, stream));
  if (wave.has_tail && wave.tail_kernels == nullptr) {
    // Only for units with a head whose error is too large, which is rare. Otherwise they do
    // nothing.
    stage("more", LaunchSample(wave, 2, stream));
    stage("more fold", LaunchFold(wave, 2, stream));
    stage("more finish", LaunchFinishAgain(wave, stream));
  }
  return status;
}

}  // namespace spillway::cuda

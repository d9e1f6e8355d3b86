// spillway-link-bench measures how fast rows move between host memory and a GPU, by engine, row
// size, span, density, order, SM count, direction, NUMA node and method of pinning. Writes one JSON
// object per line (docs/link.md); `spillway-lab bench link` makes tables and plots of them.
#include <cuda_runtime_api.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "bench/gpu/link/gather_launch.h"
#include "bench/gpu/link/gpu.h"
#include "bench/gpu/link/pattern.h"
#include "bench/gpu/link/pcie_link.h"
#include "bench/gpu/link/pinned_span.h"
#include "bench/gpu/link/plan.h"
#include "bench/gpu/link/records.h"
#include "bench/gpu/link/runner.h"
#include "bench/gpu/link/transfer.h"
#include "gpu/cuda/error.h"
#include "host/base/status_macros.h"
#include "host/memory/memory_budget.h"
#include "host/memory/topology.h"

namespace spillway::bench {
namespace {

enum ExitCode {
  kOk = 0,
  // A transfer moved wrong bytes or CUDA failed. Records written before are valid.
  kFailed = 1,
  // Nothing was measured: wrong command line, no GPU, or too little memory.
  kUnusable = 2,
};

constexpr int kRepetitions = 7;
constexpr int kQuickRepetitions = 3;

constexpr char kFooter[] =
    "Writes one JSON object a line to standard output.\n"
    "Exit codes: 0 done, 1 a transfer was wrong or CUDA failed, 2 nothing could be measured:\n"
    "wrong command line, no usable GPU, or a span beyond half of the available memory.";

struct Options {
  PlanOptions plan;
  std::string gpu;
  int repetitions = 0;  // 0: a default that depends on plan.quick
};

void Write(const Json& record) { std::cout << record.dump() << std::endl; }

// Memory that is available in the system, at most the process's limit.
int64_t MemoryAvailableBytes(const Topology& topology) {
  const int64_t limit_bytes = topology.memory_limit_bytes();
  std::ifstream file("/proc/meminfo");
  for (std::string name, value, unit; file >> name >> value && std::getline(file, unit);) {
    if (int64_t kib = 0; name == "MemAvailable:" && absl::SimpleAtoi(value, &kib)) {
      return std::min(kib * 1024, limit_bytes);
    }
  }
  return limit_bytes;
}

Machine Inspect(const Gpu& gpu, const Topology& topology) {
  Machine machine;
  machine.memory_available_bytes = MemoryAvailableBytes(topology);
  for (const NumaNode& node : topology.numa_nodes) {
    machine.numa_node_bytes.push_back(node.memory_bytes);
  }
  machine.gpu_numa_node = gpu.numa_node;
  machine.sm_count = gpu.sm_count;
  machine.has_bulk = BulkRowsAvailable();
  machine.has_batch = BatchCopyAvailable();
  return machine;
}

void ReportUnavailable(const Machine& machine, const Gpu& gpu) {
  if (!machine.has_bulk) {
    Write(UnavailableRecord(
        Engine::kBulk,
        absl::StrCat("needs compute capability 9.0 and a program that is built for it; the GPU "
                     "has ",
                     gpu.compute_capability_major, ".", gpu.compute_capability_minor)));
  }
  if (!machine.has_batch) {
    Write(UnavailableRecord(Engine::kBatch, "needs a program that is built with CUDA 12.8"));
  }
}

// Runs the plan. Holds one allocation at a time.
class Session {
 public:
  Session(const std::vector<Measurement>& plan, const Gpu& gpu, const Topology& topology,
          int repetitions, MemoryBudget* host_budget, Runner runner)
      : plan_(plan),
        gpu_(gpu),
        core_count_(topology.core_count),
        repetitions_(repetitions),
        host_budget_(host_budget),
        runner_(std::move(runner)) {}

  absl::Status Run() {
    for (size_t i = 0; i < plan_.size();) {
      // Free the last allocation before the next is made.
      span_.reset();
      const Allocation& allocation = plan_[i].allocation;
      size_t end = i;
      while (end < plan_.size() && plan_[end].allocation == allocation) ++end;
      Progress(i, absl::StrCat("pinning ", FormatBytes(allocation.bytes), ", ",
                               std::string(Name(allocation.pinning))));
      auto span = PinnedSpan::Create(allocation, core_count_, host_budget_);
      if (absl::IsFailedPrecondition(span.status())) {
        // Containers are often not allowed to bind memory to a node.
        Write(SkippedRecord(allocation, static_cast<int>(end - i),
                            std::string(span.status().message())));
        i = end;
        continue;
      }
      if (!span.ok()) return span.status();
      span_ = *std::move(span);
      FillPattern(span_->memory());
      for (; i < end; ++i) {
        RETURN_IF_ERROR(Measure(i));
      }
    }
    Progress(plan_.size(), "done");
    return absl::OkStatus();
  }

  // The number of measurements that moved wrong bytes.
  int wrong_count() const { return wrong_count_; }

 private:
  void Progress(size_t done, std::string_view what) const {
    Write(ProgressRecord(done, plan_.size(), what));
  }

  absl::Status Measure(size_t i) {
    const Measurement& m = plan_[i];
    Progress(i, Describe(m));
    const absl::StatusOr<Outcome> outcome = runner_.Run(m, repetitions_, span_->memory());
    if (!outcome.ok()) {
      return absl::Status(outcome.status().code(),
                          absl::StrCat(Describe(m), ": ", outcome.status().message()));
    }
    Write(MeasurementRecord(m, *outcome, *span_));
    if (!outcome->checked) {
      ++wrong_count_;
      std::cerr << "spillway-link-bench: " << Describe(m) << ": " << outcome->wrong << '\n';
      FillPattern(span_->memory());
    }
    // Right after the peak measurements the link runs at its speed under load.
    const bool last_peak = m.experiment == Experiment::kPeak &&
                           (i + 1 == plan_.size() || plan_[i + 1].experiment != m.experiment);
    if (last_peak) Write(LinkRecord(ReadPcieLink(gpu_.pci_bus_id)));
    return absl::OkStatus();
  }

  const std::vector<Measurement>& plan_;
  const Gpu& gpu_;
  const int core_count_;
  const int repetitions_;
  MemoryBudget* const host_budget_;
  Runner runner_;
  std::unique_ptr<PinnedSpan> span_;
  int wrong_count_ = 0;
};

int Fail(const absl::Status& status, ExitCode code) {
  std::cerr << "spillway-link-bench: " << status.message() << '\n';
  return code;
}

int Run(const Options& options) {
  const absl::StatusOr<Gpu> gpu = OpenGpu(options.gpu);
  if (!gpu.ok()) return Fail(gpu.status(), kUnusable);
  const absl::StatusOr<Topology> topology = DetectTopology();
  if (!topology.ok()) return Fail(topology.status(), kUnusable);
  const Machine machine = Inspect(*gpu, *topology);
  const absl::StatusOr<std::vector<Measurement>> plan = MakePlan(options.plan, machine);
  if (!plan.ok()) return Fail(plan.status(), kUnusable);

  MemoryBudget host_budget(machine.memory_available_bytes / 2);
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  absl::Status status = cuda::ToStatus(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
  if (!status.ok()) return Fail(status, kUnusable);
  MemoryBudget device_budget(static_cast<int64_t>(free_bytes));
  absl::StatusOr<Runner> runner = Runner::Create(*plan, &device_budget);
  if (!runner.ok()) return Fail(runner.status(), kUnusable);

  Write(DeviceRecord(*gpu, *topology));
  ReportUnavailable(machine, *gpu);
  int repetitions = options.repetitions;
  if (repetitions == 0) repetitions = options.plan.quick ? kQuickRepetitions : kRepetitions;
  Session session(*plan, *gpu, *topology, repetitions, &host_budget, *std::move(runner));
  status = session.Run();
  if (!status.ok()) return Fail(status, kFailed);
  if (session.wrong_count() > 0) {
    return Fail(absl::DataLossError(absl::StrCat(session.wrong_count(), " of ", plan->size(),
                                                 " measurements moved wrong bytes")),
                kFailed);
  }
  return std::cout ? kOk : Fail(absl::DataLossError("cannot write the output"), kFailed);
}

int Main(int argc, char** argv) {
  CLI::App app("How fast rows travel between host memory and a GPU.", "spillway-link-bench");
  app.footer(kFooter);
  Options options;
  std::map<std::string, std::optional<Experiment>> experiments = {{"all", std::nullopt}};
  for (const Experiment experiment : Experiments()) {
    experiments.emplace(Name(experiment), experiment);
  }
  std::string experiment = "all";
  uint64_t span_bytes = 0;
  app.add_option("--experiment", experiment, "one of them, or all")
      ->check(CLI::IsMember(experiments))
      ->capture_default_str();
  app.add_flag("--quick", options.plan.quick, "fewer points, rows and repetitions");
  app.add_option("--span", span_bytes,
                 "pinned host memory, a multiple of 256MiB; by default 16GiB, or what half of "
                 "the available memory allows")
      ->transform(CLI::AsSizeValue(false));
  app.add_option("--gpu", options.gpu, "index, or the beginning of the UUID (GPU-...)");
  app.add_option("--repetitions", options.repetitions, "timed runs of a measurement")
      ->check(CLI::Range(1, 1000));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kOk : kUnusable;
  }
  options.plan.experiment = experiments.at(experiment);
  if (span_bytes > static_cast<uint64_t>(INT64_MAX)) {
    return Fail(absl::InvalidArgumentError("--span is beyond 2^63 bytes"), kUnusable);
  }
  options.plan.span_bytes = static_cast<int64_t>(span_bytes);
  return Run(options);
}

}  // namespace
}  // namespace spillway::bench

int main(int argc, char** argv) { return spillway::bench::Main(argc, argv); }

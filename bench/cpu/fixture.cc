#include "bench/cpu/fixture.h"

#include <algorithm>
#include <future>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "host/base/status_macros.h"

namespace spillway::bench {

absl::StatusOr<std::unique_ptr<Fixture>> Fixture::Create(ModelSpec spec, int thread_count,
                                                         int64_t memory_bytes) {
  const std::vector<FieldError> errors = Normalize(spec);
  if (!errors.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(errors[0].field, ": ", errors[0].description));
  }
  std::unique_ptr<Fixture> fixture(new Fixture(memory_bytes));
  ArenaOptions options;
  options.limit_bytes = memory_bytes;
  ASSIGN_OR_RETURN(fixture->arena_, Arena::Create(options, &fixture->budget_));
  fixture->device_ = CreateCpuDevice({thread_count}, fixture->arena_.get(), &fixture->budget_);
  ASSIGN_OR_RETURN(fixture->model_, fixture->device_->CreateModel(spec, {}));
  ASSIGN_OR_RETURN(fixture->sequence_, fixture->device_->CreateSequence(*fixture->model_));
  fixture->pool_ =
      std::make_unique<PagePool>(fixture->arena_.get(), kPageTokenCount * spec.row_bytes());
  fixture->rows_ = std::make_unique<LayerRows>(fixture->pool_.get(), spec);
  fixture->threads_.initialize(fixture->device_->info().thread_count);
  return fixture;
}

std::unique_ptr<Job> Fixture::Run(std::unique_ptr<Job> job) {
  std::promise<std::unique_ptr<Job>> promise;
  std::future<std::unique_ptr<Job>> done = promise.get_future();
  device_->Submit(std::move(job), [&promise](std::unique_ptr<Job> finished) {
    promise.set_value(std::move(finished));
  });
  return done.get();
}

absl::Status Fixture::Append(const std::byte* k, const std::byte* v, int64_t tokens, int64_t from,
                             int64_t to) {
  constexpr int64_t kChunkTokens = 1024;
  const ModelSpec& spec = model_->spec();
  const int64_t token_bytes = int64_t{spec.head_dim} * DTypeBytes(spec.dtype);
  for (int64_t at = from; at < to; at += kChunkTokens) {
    const int64_t count = std::min(kChunkTokens, to - at);
    std::vector<std::byte> chunk_k;
    std::vector<std::byte> chunk_v;
    for (int64_t h = 0; h < spec.kv_head_count; ++h) {
      const int64_t begin = (h * tokens + at) * token_bytes;
      chunk_k.insert(chunk_k.end(), k + begin, k + begin + count * token_bytes);
      chunk_v.insert(chunk_v.end(), v + begin, v + begin + count * token_bytes);
    }
    const int64_t start = rows_->token_count();
    absl::Status status = rows_->PrepareAppend(count);
    if (!status.ok()) return status;
    status = device_->PrepareAppend(*model_, *sequence_, 0, start, count);
    if (!status.ok()) return status;
    auto job = std::make_unique<Job>();
    job->model = model_.get();
    JobItem& item = job->items.emplace_back();
    item.sequence = sequence_.get();
    item.append = AppendWork::Dense(rows_.get(), start, count, chunk_k.data(), chunk_v.data());
    job = Run(std::move(job));
    if (!job->items[0].status.ok()) return job->items[0].status;
  }
  return absl::OkStatus();
}

absl::StatusOr<Fixture::Attended> Fixture::Attend(const Policy& policy, const float* q,
                                                  int64_t visible) {
  auto job = std::make_unique<Job>();
  job->model = model_.get();
  JobItem& item = job->items.emplace_back();
  item.sequence = sequence_.get();
  AttendQuery& attend = item.attend.emplace();
  attend.rows = rows_.get();
  attend.policy = policy;
  attend.q = reinterpret_cast<const std::byte*>(q);
  attend.query_count = 1;
  attend.visible = {visible};
  job = Run(std::move(job));
  if (!job->items[0].status.ok()) return job->items[0].status;
  return Attended{std::move(job->items[0].result), job->device_time_us};
}

double Fixture::ReadRows(int64_t token_count, CacheFlush& flush) {
  std::vector<const std::byte*> pages;
  for (int h = 0; h < rows_->kv_head_count(); ++h) {
    for (int64_t p = 0; p * kPageTokenCount < token_count; ++p) pages.push_back(rows_->Page(h, p));
  }
  return PlainReadSeconds(threads_, pages, kPageTokenCount * rows_->row_bytes(), flush);
}

}  // namespace spillway::bench

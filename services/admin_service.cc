#include "services/admin_service.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>

#include "engine/errors.h"
#include "services/call.h"
#include "services/convert/attend.h"
#include "services/convert/lookup.h"
#include "services/convert/metrics.h"
#include "services/convert/model.h"
#include "services/fill_page.h"

namespace spillway {
namespace {

constexpr int64_t kStatisticsPageSize = 1000;
constexpr int64_t kHeadAuditListMax = 1000;
constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

void FillMemory(Engine& engine, int64_t row_bytes, int64_t index_bytes,
                v1::MemoryStatistics& memory) {
  const ArenaStatistics arena = engine.arena().statistics();
  memory.set_limit_bytes(engine.budget().limit_bytes());
  const int64_t other_bytes =
      engine.budget().used_bytes() - engine.budget().used_bytes(MemoryUse::kPages);
  // The budget is charged for whole chunks; free slabs in them can be used by others.
  memory.set_used_bytes(arena.used_bytes + other_bytes);
  memory.set_arena_committed_bytes(arena.committed_bytes);
  memory.set_arena_huge_page_bytes(arena.huge_page_bytes);
  memory.set_row_bytes(row_bytes);
  memory.set_index_bytes(index_bytes);
  memory.set_other_bytes(other_bytes);
}

// The same for a tenant: only its own memory.
void FillMemory(Engine& engine, const Account& account, int64_t row_bytes, int64_t index_bytes,
                v1::MemoryStatistics& memory) {
  const int64_t quota = account.quota().bytes_max;
  const int64_t limit = engine.budget().limit_bytes();
  memory.set_limit_bytes(quota > 0 ? std::min(quota, limit) : limit);
  memory.set_used_bytes(account.used_bytes());
  memory.set_row_bytes(row_bytes);
  memory.set_index_bytes(index_bytes);
}

// What the caller may see: everything if the daemon requires no tokens.
std::vector<std::shared_ptr<Model>> ModelsOf(Engine& engine, const Caller& caller) {
  const Registry& registry = engine.registry();
  return caller.is_tenant() ? registry.ListModelsOf(caller.name_space(), "", kAll).items
                            : registry.ListModels("", kAll).items;
}
std::vector<std::shared_ptr<Sequence>> SequencesOf(Engine& engine, const Caller& caller) {
  const Registry& registry = engine.registry();
  return caller.is_tenant() ? registry.ListSequencesOf(caller.name_space(), nullptr, "", kAll).items
                            : registry.ListSequences(nullptr, "", kAll).items;
}

// Sums over the sequences.
struct Sums {
  struct OfModel {
    int64_t sequence_count = 0;
    int64_t token_count = 0;
  };
  std::map<const Model*, OfModel> models;
  int64_t index_bytes = 0;
};

Sums SumUp(Engine& engine, const Caller& caller) {
  Sums sums;
  for (const std::shared_ptr<Sequence>& sequence : SequencesOf(engine, caller)) {
    const SequenceSnapshot snapshot = sequence->snapshot();
    Sums::OfModel& sum = sums.models[sequence->model.get()];
    ++sum.sequence_count;
    sum.token_count += snapshot.token_count;
    sums.index_bytes += snapshot.index_bytes;
  }
  return sums;
}

// How many more tokens fit before the daemon's memory or the account's quota is exhausted.
int64_t FreeTokenCount(const Model& model, const Account& account, const Engine& engine) {
  const int64_t fit = engine.FreeTokenCount(model);
  const int64_t most = account.quota().bytes_max;
  if (most == 0) return fit;
  const ModelSpec& spec = model.spec;
  const int64_t bytes =
      spec.row_bytes() * spec.kv_head_count * spec.layer_count + engine.IndexBytesPerToken(spec);
  return std::clamp<int64_t>((most - account.used_bytes()) / bytes, 0, fit);
}

v1::ModelStatistics ModelToProto(const Model& model, const Sums& sums, Engine& engine) {
  v1::ModelStatistics out;
  out.set_model(model.name);
  if (const auto sum = sums.models.find(&model); sum != sums.models.end()) {
    out.set_sequence_count(sum->second.sequence_count);
    out.set_token_count(sum->second.token_count);
  }
  out.set_free_token_count(
      FreeTokenCount(model, *engine.accounts().Of(NamespaceOf(model.id)), engine));
  ToProto(model.work, *out.mutable_work());
  return out;
}

v1::SequenceStatistics SequenceToProto(const Sequence& sequence) {
  const SequenceSnapshot snapshot = sequence.snapshot();
  v1::SequenceStatistics out;
  out.set_sequence(sequence.name);
  out.set_token_count(snapshot.token_count);
  out.set_row_bytes(snapshot.row_bytes);
  out.set_index_bytes(snapshot.index_bytes);
  ToProto(sequence.work, *out.mutable_work());
  return out;
}

// Fills in the audit of the caller's models, and the heads of `of_heads`, which may be null.
// Returns the bytes of the rows of the caller's models.
int64_t FillAudit(Engine& engine, const Caller& caller, const Model* of_heads,
                  v1::GetStatisticsResponse& response) {
  v1::AuditStatistics& audit = *response.mutable_audit();
  if (const Auditor* const auditor = engine.auditor(); auditor != nullptr) {
    audit.set_share(auditor->share());
    if (!caller.is_tenant()) audit.set_dropped_count(auditor->dropped_count());
  }
  int64_t row_bytes = 0;
  for (const std::shared_ptr<Model>& model : ModelsOf(engine, caller)) {
    for (const HeadAudit& head : model->audits.Heads()) {
      audit.set_check_count(audit.check_count() + head.check_count);
      audit.set_violation_count(audit.violation_count() + head.violation_count);
      audit.set_raised_head_count(audit.raised_head_count() + (head.level > 0 ? 1 : 0));
      if (model.get() != of_heads || response.head_audits_size() >= kHeadAuditListMax) continue;
      ToProto(head, *response.add_head_audits());
    }
    row_bytes += model->row_pool.used_page_count() * model->row_pool.page_bytes();
  }
  return row_bytes;
}

}  // namespace

AdminService::AdminService(const ServiceContext& services) : Service(services) {
  Unary("/spillway.v1.AdminService/GetServerInfo", &AdminService::GetServerInfo);
  Unary("/spillway.v1.AdminService/GetStatistics", &AdminService::GetStatistics,
        Access::kWhileDraining);
}

grpc::ServerUnaryReactor* AdminService::GetServerInfo(grpc::CallbackServerContext* context,
                                                      const Caller& caller,
                                                      const v1::GetServerInfoRequest*,
                                                      v1::GetServerInfoResponse* response) {
  response->set_version(services_.version);
  response->set_boot_id(services_.boot_id);
  response->set_store_id(services_.engine.store_id());
  *response->mutable_start_time() = ToProto(services_.start_time);
  for (const Device* part : services_.engine.device().parts()) {
    const DeviceInfo& info = part->info();
    v1::DeviceInfo& device = *response->add_devices();
    device.set_name(info.name);
    device.set_description(info.description);
    device.set_thread_count(info.thread_count);
    device.set_simd_target(info.simd_target);
    device.set_uuid(info.uuid);
    device.set_mps(info.mps.value_or(false));
    if (const std::optional<DeviceMemory> memory = part->memory()) {
      device.set_memory_limit_bytes(memory->limit_bytes);
      device.set_resident_limit_bytes(memory->resident_limit_bytes);
      if (caller.is_tenant()) continue;  // the rest includes memory of other tenants
      device.set_memory_used_bytes(memory->used_bytes);
      device.set_resident_used_bytes(memory->resident_used_bytes);
      device.set_shared_used_bytes(memory->shared_used_bytes);
    }
  }
  v1::ServerLimits& limits = *response->mutable_limits();
  limits.set_message_bytes_max(kMessageBytesMax);
  const Quota quota = services_.engine.accounts().Of(caller.name_space())->quota();
  const int64_t memory_bytes = services_.engine.budget().limit_bytes();
  limits.set_memory_bytes_max(quota.bytes_max > 0 ? std::min(quota.bytes_max, memory_bytes)
                                                  : memory_bytes);
  limits.set_query_token_count_max(kQueryCountMax);
  limits.set_sparse_query_token_count_max(kSparseQueryCountMax);
  limits.set_attend_item_count_max(kAttendItemCountMax);
  const int64_t sequences_of_all = services_.engine.registry().sequence_count_max();
  const int64_t sequence_count = quota.sequence_count_max > 0
                                     ? std::min(quota.sequence_count_max, sequences_of_all)
                                     : sequences_of_all;
  limits.set_sequence_count_max(static_cast<int32_t>(sequence_count));
  response->set_page_token_count(kPageTokenCount);
  response->set_region_socket(services_.region_socket);
  return Answer(services_, context, absl::OkStatus());
}

grpc::ServerUnaryReactor* AdminService::GetStatistics(grpc::CallbackServerContext* context,
                                                      const Caller& caller,
                                                      const v1::GetStatisticsRequest* request,
                                                      v1::GetStatisticsResponse* response) {
  Engine& engine = services_.engine;
  const absl::StatusOr<PageRequest> page =
      ParsePage(request->page_size(), request->page_token(), kStatisticsPageSize);
  if (!page.ok()) return Answer(services_, context, page.status());
  if (caller.is_tenant() && request->include_metrics()) {
    return Answer(
        services_, context,
        WithReason(absl::PermissionDeniedError(
                       "include_metrics: metrics are about all namespaces and cannot be read with "
                       "a token; the address http.listen of the daemon has them"),
                   Reason::kMetricsOfAll));
  }
  std::shared_ptr<Model> asked;
  if (!request->model().empty()) {
    absl::StatusOr<std::shared_ptr<Model>> model =
        FindModel(engine, caller, request->model(), "model");
    if (!model.ok()) return Answer(services_, context, model.status());
    asked = *std::move(model);
  }
  const Sums sums = SumUp(engine, caller);
  const auto describe = [&](const Model& model) { return ModelToProto(model, sums, engine); };
  if (asked == nullptr) {
    response->set_next_page_token(
        FillPage(engine.registry().ListModelsOf(caller.name_space(), page->after, page->size),
                 *response->mutable_models(), describe));
  } else {
    *response->add_models() = describe(*asked);
    response->set_next_page_token(
        FillPage(engine.registry().ListSequencesOf(caller.name_space(), asked.get(), page->after,
                                                   page->size),
                 *response->mutable_sequences(), SequenceToProto));
  }
  const Model* const audited = page->after.empty() ? asked.get() : nullptr;
  const int64_t row_bytes = FillAudit(engine, caller, audited, *response);
  if (!caller.is_tenant()) {
    FillMemory(engine, row_bytes, sums.index_bytes, *response->mutable_memory());
    ToProto(engine.work(), *response->mutable_work());
    if (request->include_metrics()) {
      for (const MetricFamily& family : services_.metrics.Collect()) {
        ToProto(family, *response->add_metrics());
      }
    }
    return Answer(services_, context, absl::OkStatus());
  }
  FillMemory(engine, *engine.accounts().Of(caller.name_space()), row_bytes, sums.index_bytes,
             *response->mutable_memory());
  WorkCounters work;
  for (const std::shared_ptr<Model>& model : ModelsOf(engine, caller)) work.Add(model->work);
  ToProto(work, *response->mutable_work());
  return Answer(services_, context, absl::OkStatus());
}

}  // namespace spillway

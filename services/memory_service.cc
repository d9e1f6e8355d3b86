#include "services/memory_service.h"

#include "absl/strings/str_cat.h"
#include "services/call.h"
#include "services/convert/names.h"

namespace spillway {
namespace {

void Fill(const Region& region, v1::Region& out) {
  out.set_name(absl::StrCat("regions/", region.id));
  out.set_byte_count(static_cast<int64_t>(region.bytes.size()));
  if (region.gpu() != nullptr) out.set_device(region.gpu()->info().uuid);
}

void FillHandle(const Region& region, v1::AttachRegionResponse& out) {
  if (region.gpu_memory != nullptr) out.set_ipc_handle(region.gpu_memory->handle());
}
// A doorbell is in host memory, so it has no handle.
void FillHandle(const Region&, v1::AttachDoorbellResponse&) {}

}  // namespace

MemoryService::MemoryService(const ServiceContext& services) : Service(services) {
  Unary("/spillway.v1.MemoryService/AttachRegion", &MemoryService::AttachRegion);
  Unary("/spillway.v1.MemoryService/ListRegions", &MemoryService::ListRegions);
  Unary("/spillway.v1.MemoryService/DetachRegion", &MemoryService::DetachRegion);
  Unary("/spillway.v1.MemoryService/AttachDoorbell", &MemoryService::AttachDoorbell);
}

grpc::ServerUnaryReactor* MemoryService::AttachRegion(grpc::CallbackServerContext* context,
                                                      const Caller& caller,
                                                      const v1::AttachRegionRequest* request,
                                                      v1::AttachRegionResponse* response) {
  return AnswerAttached(context, *response, [this, caller, request] {
    return request->device().empty()
               ? services_.regions.Attach(caller, request->session(), request->byte_count())
               : services_.regions.AttachGpu(caller, request->session(), request->byte_count(),
                                             request->device());
  });
}

grpc::ServerUnaryReactor* MemoryService::AttachDoorbell(grpc::CallbackServerContext* context,
                                                        const Caller& caller,
                                                        const v1::AttachDoorbellRequest* request,
                                                        v1::AttachDoorbellResponse* response) {
  return AnswerAttached(context, *response, [this, caller, request] {
    return services_.doorbells.Attach(caller, request->session(), request->byte_count());
  });
}

template <typename Response, typename Attach>
grpc::ServerUnaryReactor* MemoryService::AnswerAttached(grpc::CallbackServerContext* context,
                                                        Response& response, Attach attach) {
  auto* call = new UnaryCall(services_, *context);
  grpc::ServerUnaryReactor* const reactor = call->reactor();
  // The operating system fills every page with zeros, which takes time.
  services_.background.enqueue([call, &response, attach] {
    if (absl::Status status = call->cancel()->Check(); !status.ok()) return call->End(status);
    absl::StatusOr<std::shared_ptr<Region>> region = attach();
    const absl::Status status = region.status();
    if (status.ok()) {
      Fill(**region, *response.mutable_region());
      FillHandle(**region, response);
      // Before the answer, after which the server may go, and with it what the region uses.
      region->reset();
    }
    call->End(status);
  });
  return reactor;
}

grpc::ServerUnaryReactor* MemoryService::ListRegions(grpc::CallbackServerContext* context,
                                                     const Caller& caller,
                                                     const v1::ListRegionsRequest* request,
                                                     v1::ListRegionsResponse* response) {
  const absl::StatusOr<std::vector<std::shared_ptr<Region>>> regions =
      services_.regions.List(caller, request->session());
  if (regions.ok()) {
    for (const std::shared_ptr<Region>& region : *regions) Fill(*region, *response->add_regions());
  }
  return Answer(services_, context, regions.status());
}

grpc::ServerUnaryReactor* MemoryService::DetachRegion(grpc::CallbackServerContext* context,
                                                      const Caller& caller,
                                                      const v1::DetachRegionRequest* request,
                                                      v1::DetachRegionResponse*) {
  const absl::StatusOr<std::string> id = ParseName(request->name(), "regions", "name");
  return Answer(services_, context,
                id.ok() ? services_.regions.Detach(caller, request->session(), *id) : id.status());
}

}  // namespace spillway

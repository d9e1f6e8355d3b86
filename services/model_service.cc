#include "services/model_service.h"

#include <utility>

#include "services/call.h"
#include "services/convert/lookup.h"
#include "services/convert/model.h"
#include "services/fill_page.h"
#include "services/upload_stream.h"

namespace spillway {

ModelService::ModelService(const ServiceContext& services) : Service(services) {
  Unary("/spillway.v1.ModelService/CreateModel", &ModelService::CreateModel);
  Unary("/spillway.v1.ModelService/GetModel", &ModelService::GetModel);
  Unary("/spillway.v1.ModelService/ListModels", &ModelService::ListModels);
  Unary("/spillway.v1.ModelService/DeleteModel", &ModelService::DeleteModel);
  ClientStream<v1::UploadHashWeightsResponse>(
      "/spillway.v1.ModelService/UploadHashWeights",
      [this](grpc::CallbackServerContext* context, const Caller& caller,
             v1::UploadHashWeightsResponse* response) {
        return new UploadStream(services_, *context, caller, response);
      });
}

grpc::ServerUnaryReactor* ModelService::CreateModel(grpc::CallbackServerContext* context,
                                                    const Caller& caller,
                                                    const v1::CreateModelRequest* request,
                                                    v1::CreateModelResponse* response) {
  v1::Model asked = request->model();
  if (!asked.default_policy().has_seed()) {
    asked.mutable_default_policy()->set_seed(services_.engine.sampling_seed());
  }
  absl::StatusOr<ModelDescription> description = FromProto(asked);
  if (!description.ok()) return Answer(services_, context, description.status());
  absl::StatusOr<std::string> id = ChooseId(request->model_id(), "model_id");
  if (!id.ok()) return Answer(services_, context, id.status());
  auto* call = new UnaryCall(services_, *context);
  grpc::ServerUnaryReactor* const reactor = call->reactor();
  const absl::Status status = services_.model_threads.Run(
      [this, call, response, id = caller.IdOf(*id), description = *std::move(description)] {
        const absl::StatusOr<std::shared_ptr<Model>> model = services_.engine.CreateModel(
            id, description.spec, description.policy, call->cancel().get());
        if (model.ok()) *response->mutable_model() = ToProto(**model, services_.engine);
        call->End(model.status());
      });
  if (!status.ok()) call->End(status);
  return reactor;
}

grpc::ServerUnaryReactor* ModelService::GetModel(grpc::CallbackServerContext* context,
                                                 const Caller& caller,
                                                 const v1::GetModelRequest* request,
                                                 v1::GetModelResponse* response) {
  const absl::StatusOr<std::shared_ptr<Model>> model =
      FindModel(services_.engine, caller, request->name(), "name");
  if (model.ok()) *response->mutable_model() = ToProto(**model, services_.engine);
  return Answer(services_, context, model.status());
}

grpc::ServerUnaryReactor* ModelService::ListModels(grpc::CallbackServerContext* context,
                                                   const Caller& caller,
                                                   const v1::ListModelsRequest* request,
                                                   v1::ListModelsResponse* response) {
  const absl::StatusOr<PageRequest> page = ParsePage(request->page_size(), request->page_token());
  if (!page.ok()) return Answer(services_, context, page.status());
  const Page<Model> models =
      services_.engine.registry().ListModelsOf(caller.name_space(), page->after, page->size);
  response->set_next_page_token(
      FillPage(models, *response->mutable_models(),
               [this](const Model& model) { return ToProto(model, services_.engine); }));
  return Answer(services_, context, absl::OkStatus());
}

grpc::ServerUnaryReactor* ModelService::DeleteModel(grpc::CallbackServerContext* context,
                                                    const Caller& caller,
                                                    const v1::DeleteModelRequest* request,
                                                    v1::DeleteModelResponse*) {
  const absl::StatusOr<std::string> id = ParseName(request->name(), "models", "name");
  return Answer(services_, context,
                id.ok() ? services_.engine.registry().RemoveModel(caller.IdOf(*id)) : id.status());
}

}  // namespace spillway

#include "services/snapshots.h"

#include <future>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/errors.h"
#include "engine/snapshot/description.h"
#include "engine/snapshot/load.h"
#include "engine/snapshot/remove.h"
#include "engine/snapshot/save.h"
#include "host/base/status_macros.h"
#include "services/convert/lookup.h"
#include "services/convert/model.h"
#include "services/convert/policy.h"

namespace spillway {
namespace {

absl::Status Parse(const SnapshotFolder& folder, const std::string& bytes, const char* what,
                   google::protobuf::MessageLite& message) {
  if (message.ParseFromString(bytes)) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat(folder.PathOf(kManifestName), ": \"", what, "\" does not parse"));
}

absl::Status Differs(const SnapshotFolder& folder, const std::string& why) {
  return WithReason(
      absl::FailedPreconditionError(absl::StrCat("the snapshot at ", folder.path(), ": ", why)),
      Reason::kSnapshotModelDiffers, {{"folder", folder.path()}});
}

// The folder below snapshots.folder. Every namespace has its own folder there.
absl::StatusOr<std::string> FolderOf(const ServiceContext& services, const Caller& caller,
                                     const std::string& asked) {
  if (!caller.is_tenant()) return asked;
  if (services.snapshot_folder == "/") {
    return absl::FailedPreconditionError(
        "snapshots.folder is \"/\", which allows any folder: callers with a token cannot use "
        "snapshots then");
  }
  return absl::StrCat(std::string(caller.name_space()), "/", asked);
}

// Charged with the files of a tenant's snapshots; null if the daemon has no tenants.
std::shared_ptr<Account> AccountOf(const ServiceContext& services, const Caller& caller) {
  return caller.is_tenant() ? services.engine.accounts().Of(caller.name_space()) : nullptr;
}

// The model into which the rows are loaded. It is created if the request names no model and it does
// not exist.
absl::StatusOr<std::shared_ptr<Model>> ModelOf(Engine& engine, const Caller& caller,
                                               const SnapshotFolder& folder, const v1::Model& saved,
                                               const ModelDescription& description,
                                               const std::string& weights_sha256,
                                               const std::string& asked,
                                               const CancelToken& cancel) {
  absl::StatusOr<std::string> id =
      ParseName(asked.empty() ? saved.name() : asked, "models", "sequence.model");
  if (!id.ok()) {
    return asked.empty() ? absl::DataLossError(absl::StrCat(folder.PathOf(kManifestName),
                                                            ": the model's name is not valid"))
                         : id.status();
  }
  absl::StatusOr<std::shared_ptr<Model>> model = engine.registry().FindModel(caller.IdOf(*id));
  if (absl::IsNotFound(model.status()) && asked.empty()) {
    if (description.spec.has_weights()) {
      return Differs(folder, absl::StrCat("there is no model models/", *id,
                                          ", and it needs hash weights: create it, and upload the "
                                          "file whose SHA-256 digest is ",
                                          weights_sha256));
    }
    model = engine.CreateModel(caller.IdOf(*id), description.spec, description.policy, &cancel);
    if (absl::IsAlreadyExists(model.status()))
      model = engine.registry().FindModel(caller.IdOf(*id));
  }
  RETURN_IF_ERROR(model.status());
  const std::string difference = FirstDifference(DescribeModel(saved.name(), description.spec),
                                                 DescribeModel((*model)->name, (*model)->spec));
  if (!difference.empty()) {
    return Differs(folder, absl::StrCat((*model)->name, " is another model: ", difference));
  }
  // A model that waits for its weights is refused later, as in all calls.
  if ((*model)->ready() && (*model)->weights_sha256() != weights_sha256) {
    return Differs(folder,
                   absl::StrCat((*model)->name, " has other hash weights: their SHA-256 is ",
                                (*model)->weights_sha256(), ", saved was ", weights_sha256));
  }
  return model;
}

}  // namespace

absl::Status SaveSequence(const ServiceContext& services, const Caller& caller,
                          const v1::SaveSequenceRequest& request,
                          const std::shared_ptr<CancelToken>& cancel,
                          v1::SaveSequenceResponse& response) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> sequence,
                   FindSequence(services.engine, caller, request.name(), "name"));
  const std::string& client_data = request.client_data();
  if (static_cast<int64_t>(client_data.size()) > kClientDataBytesMax) {
    return InvalidField("client_data", absl::StrCat(client_data.size(), " bytes are more than ",
                                                    kClientDataBytesMax));
  }
  ASSIGN_OR_RETURN(const std::string name, FolderOf(services, caller, request.folder()));
  ASSIGN_OR_RETURN(SnapshotFolder folder, SnapshotFolder::OpenToSave(services.snapshot_folder, name,
                                                                     AccountOf(services, caller)));
  const auto answered = std::make_shared<std::promise<absl::StatusOr<SharedSequence>>>();
  services.engine.ShareSequence(sequence, [answered](absl::StatusOr<SharedSequence> shared) {
    answered->set_value(std::move(shared));
  });
  ASSIGN_OR_RETURN(const SharedSequence shared, answered->get_future().get());
  v1::Sequence described = ToProto(*sequence);
  v1::Sequence kept;
  *kept.mutable_policy() = described.policy();
  *kept.mutable_ttl() = described.ttl();
  Manifest manifest;
  const Model& model = *sequence->model;
  v1::Model made = ToProto(model, services.engine);
  made.clear_create_time();  // so that saving again gives the same bytes
  manifest.model_json = DescribeModel(model.name, model.spec);
  manifest.model_message = made.SerializeAsString();
  manifest.sequence_message = kept.SerializeAsString();
  manifest.weights_sha256 = sequence->model->weights_sha256();
  manifest.token_count = shared.token_count;
  ASSIGN_OR_RETURN(const SavedSnapshot saved,
                   SaveSnapshot(folder, sequence->model->spec, shared.rows, std::move(manifest),
                                std::as_bytes(std::span(client_data.data(), client_data.size())),
                                services.engine.budget(), *cancel));
  response.set_token_count(shared.token_count);
  response.set_generation(shared.generation);
  response.set_byte_count(saved.byte_count);
  response.set_written_byte_count(saved.written_byte_count);
  return absl::OkStatus();
}

absl::Status LoadSequence(const ServiceContext& services, const Caller& caller,
                          const v1::LoadSequenceRequest& request,
                          const std::shared_ptr<CancelToken>& cancel,
                          v1::LoadSequenceResponse& response) {
  Engine& engine = services.engine;
  ASSIGN_OR_RETURN(const std::string id, ChooseId(request.sequence_id(), "sequence_id"));
  // Checked before the work, and again when the sequence is listed.
  if (engine.registry().FindSequence(caller.IdOf(id)).ok()) {
    return WithReason(absl::AlreadyExistsError(absl::StrCat("sequences/", id, " exists already")),
                      Reason::kSequenceExists, {{"name", absl::StrCat("sequences/", id)}});
  }
  ASSIGN_OR_RETURN(const std::string name, FolderOf(services, caller, request.folder()));
  ASSIGN_OR_RETURN(const SnapshotFolder folder,
                   SnapshotFolder::OpenToLoad(services.snapshot_folder, name));
  ASSIGN_OR_RETURN(const Manifest manifest, ReadManifest(folder, engine.budget()));
  v1::Model saved;
  v1::Sequence kept;
  RETURN_IF_ERROR(Parse(folder, manifest.model_message, "model_message", saved));
  RETURN_IF_ERROR(Parse(folder, manifest.sequence_message, "sequence_message", kept));
  const absl::StatusOr<ModelDescription> description = FromProto(saved);
  if (!description.ok()) {
    return Differs(folder, absl::StrCat("this daemon has no such models: ",
                                        std::string(description.status().message())));
  }
  if (manifest.model_json != DescribeModel(saved.name(), description->spec)) {
    return absl::DataLossError(
        absl::StrCat(folder.PathOf(kManifestName), ": \"model\" and \"model_message\" differ"));
  }
  if (absl::Status status = CheckFits(manifest, description->spec); !status.ok()) {
    return WithMessage(status, absl::StrCat(folder.path(), "/", status.message()));
  }
  const v1::Sequence& asked = request.sequence();
  ASSIGN_OR_RETURN(const std::shared_ptr<Model> model,
                   ModelOf(engine, caller, folder, saved, *description, manifest.weights_sha256,
                           asked.model(), *cancel));
  const absl::StatusOr<Policy> kept_policy =
      ApplyPolicy(kept.policy(), model->policy, model->spec, "sequence.policy.");
  if (!kept_policy.ok()) {
    return Differs(folder, absl::StrCat("this daemon has no such policies: ",
                                        std::string(kept_policy.status().message())));
  }
  ASSIGN_OR_RETURN(const Policy policy,
                   ApplyPolicy(asked.policy(), *kept_policy, model->spec, "sequence.policy."));
  ASSIGN_OR_RETURN(const absl::Duration kept_ttl,
                   TtlFromProto(kept, services.limits.ttl_default()));
  ASSIGN_OR_RETURN(const absl::Duration ttl, TtlFromProto(asked, kept_ttl));
  ASSIGN_OR_RETURN(*response.mutable_client_data(), ReadClientData(folder, manifest));
  ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> sequence,
                   engine.MakeSequence(caller.IdOf(id), model, policy, ttl,
                                       OriginOf(caller, request.sequence_id())));
  RETURN_IF_ERROR(
      ReadRows(folder, model->spec, manifest, engine.budget(), *cancel, [&](const Chunk& chunk) {
        const auto answered = std::make_shared<std::promise<absl::Status>>();
        engine.Append({sequence, chunk, cancel}, [answered](absl::StatusOr<AppendOutcome> outcome) {
          answered->set_value(outcome.status());
        });
        return answered->get_future().get();
      }));
  RETURN_IF_ERROR(cancel->Check());
  RETURN_IF_ERROR(engine.ListSequence(sequence));
  *response.mutable_sequence() = ToProto(*sequence);
  return absl::OkStatus();
}

absl::Status DeleteSnapshot(const ServiceContext& services, const Caller& caller,
                            const v1::DeleteSnapshotRequest& request) {
  ASSIGN_OR_RETURN(const std::string name, FolderOf(services, caller, request.folder()));
  return RemoveSnapshot(services.snapshot_folder, name, AccountOf(services, caller));
}

}  // namespace spillway

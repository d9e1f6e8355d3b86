#include "services/attend_call.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/checks.h"
#include "engine/errors.h"
#include "host/base/status_macros.h"
#include "services/convert/attend.h"
#include "services/convert/lookup.h"

namespace spillway {
namespace {

class AttendCall final : public UnaryCall {
 public:
  AttendCall(const ServiceContext& services, grpc::CallbackServerContext& context,
             const Caller& caller, const v1::AttendRequest& request, v1::AttendResponse* response)
      : UnaryCall(services, context), caller_(caller), request_(request), response_(response) {}

  void Start() {
    AttendRequest work;
    work.layer = request_.layer();
    work.cancel = cancel();
    work.trace = caller_.trace();
    if (absl::Status status = Parse(work); !status.ok()) return End(status);
    services_.engine.Attend(std::move(work), [this](absl::StatusOr<AttendOutcome> outcome) {
      if (outcome.ok()) Fill(*outcome);
      End(outcome.status());
    });
  }

 private:
  absl::Status Parse(AttendRequest& work) {
    const int count = request_.items_size();
    if (count < 1 || count > kAttendItemCountMax) {
      return InvalidField("items",
                          absl::StrCat(count, " items are not in [1, ", kAttendItemCountMax, "]"));
    }
    OneModel together;
    int64_t response_bytes = 0;
    int64_t held_bytes = 0;
    for (int i = 0; i < count; ++i) {
      const std::string path = absl::StrCat("items[", i, "].");
      absl::StatusOr<AttendItem> item = ItemFromProto(services_, caller_, request_.items(i), path);
      if (!item.ok()) return item.status();
      const Model& model = *item->sequence->model;
      RETURN_IF_ERROR(together.Add(*item->sequence, path + "sequence"));
      RETURN_IF_ERROR(CheckLayer(request_.layer(), model.spec));
      ASSIGN_OR_RETURN(
          ResultPlaces places,
          PlacesFromProto(request_.items(i), request_.out_dtype(), item->attend, model.spec,
                          CallerRegions(services_.regions, caller_), path));
      sequences_.push_back(item->sequence);
      const int64_t bytes = ResultBytes(item->attend, model.spec, places);
      places_.push_back(std::move(places));
      response_bytes += bytes;
      held_bytes += bytes + item->attend.query_count * model.spec.query_head_count *
                                model.spec.head_dim *
                                (DTypeBytes(item->attend.q_dtype) + int64_t{sizeof(float)});
      work.items.push_back(*std::move(item));
    }
    if (response_bytes > kMessageBytesMax) {
      return InvalidField(
          "items", absl::StrCat("the answer would take ", response_bytes, " bytes, more than ",
                                kMessageBytesMax, "; send fewer queries"));
    }
    ASSIGN_OR_RETURN(reservation_, services_.engine.budget().Reserve(held_bytes, "a request",
                                                                     MemoryUse::kMessages));
    return absl::OkStatus();
  }

  void Fill(const AttendOutcome& outcome) {
    for (size_t i = 0; i < outcome.job->items.size(); ++i) {
      const JobItem& item = outcome.job->items[i];
      v1::AttendResult& result = *response_->add_results();
      absl::Status status = item.status;
      if (status.ok()) {
        status = FillResult(*outcome.job, item, sequences_[i]->model->spec, places_[i], result);
      }
      if (!status.ok()) *result.mutable_status() = services_.status.ToRpc(status, caller_.trace());
    }
  }

  const Caller caller_;
  const v1::AttendRequest& request_;
  v1::AttendResponse* const response_;
  std::vector<ResultPlaces> places_;
  std::vector<std::shared_ptr<Sequence>> sequences_;
  MemoryReservation reservation_;
};

class SelectCall final : public UnaryCall {
 public:
  using UnaryCall::UnaryCall;

  void Start(const Caller& caller, const v1::SelectRequest& request, v1::SelectResponse* response) {
    absl::StatusOr<AttendItem> item = ItemFromProto(services_, caller, request.item(), "item.");
    if (!item.ok()) return End(item.status());
    if (absl::Status status = CheckSelectable(item->attend); !status.ok()) return End(status);
    absl::Status layer = CheckLayer(request.layer(), item->sequence->model->spec);
    if (!layer.ok()) return End(layer);
    AttendRequest work;
    work.layer = request.layer();
    work.cancel = cancel();
    work.trace = caller.trace();
    work.select_only = true;
    work.items.push_back(*std::move(item));
    services_.engine.Attend(
        std::move(work), [this, response](absl::StatusOr<AttendOutcome> outcome) {
          End(outcome.ok() ? Fill(outcome->job->items.front(), response) : outcome.status());
        });
  }

 private:
  static absl::Status Fill(const JobItem& item, v1::SelectResponse* response) {
    if (!item.status.ok()) return item.status;
    FillCertificate(item, *response->mutable_certificate());
    return FillSelection(item.result, *response->mutable_selection());
  }
};

}  // namespace

absl::StatusOr<AttendItem> ItemFromProto(const ServiceContext& services, const Caller& caller,
                                         const v1::AttendItem& item, const std::string& path) {
  AttendItem out;
  ASSIGN_OR_RETURN(out.sequence,
                   FindSequence(services.engine, caller, item.sequence(), path + "sequence"));
  RETURN_IF_ERROR(QueryFromProto(item, CallerRegions(services.regions, caller), path, out));
  return out;
}

grpc::ServerUnaryReactor* StartAttend(const ServiceContext& services,
                                      grpc::CallbackServerContext& context, const Caller& caller,
                                      const v1::AttendRequest& request,
                                      v1::AttendResponse* response) {
  auto* call = new AttendCall(services, context, caller, request, response);
  grpc::ServerUnaryReactor* const reactor = call->reactor();
  call->Start();
  return reactor;
}

grpc::ServerUnaryReactor* StartSelect(const ServiceContext& services,
                                      grpc::CallbackServerContext& context, const Caller& caller,
                                      const v1::SelectRequest& request,
                                      v1::SelectResponse* response) {
  auto* call = new SelectCall(services, context);
  grpc::ServerUnaryReactor* const reactor = call->reactor();
  call->Start(caller, request, response);
  return reactor;
}

}  // namespace spillway

#include "services/health_service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "services/call.h"

namespace spillway {

// One Watch call: sends the state of its name at once, and then each change. Except for its
// creation and OnDone(), it is used under the lock of the service.
class HealthService::Watch final : public grpc::ServerWriteReactor<Response> {
 public:
  Watch(HealthService& service, const absl::StatusOr<const Request*>& request) : service_(service) {
    const MutexLock lock(service_.mutex_);
    if (!request.ok()) {
      End(request.status());
      return;
    }
    name_ = (*request)->value();
    if (service_.watches_.size() >= kWatchCountMax) {
      service_.watches_.front()->End(absl::ResourceExhaustedError(absl::StrCat(
          "more than ", kWatchCountMax, " calls watch the health, and this one is the oldest")));
    }
    place_ = service_.watches_.insert(service_.watches_.end(), this);
    is_listed_ = true;
    Tell();
  }

  const std::string& name() const { return name_; }

  // Sends the state if the client does not know it. Of states that change while a message is being
  // sent, only the last one is sent.
  void Tell() ABSL_EXCLUSIVE_LOCKS_REQUIRED(service_.mutex_) {
    const Serving now = service_.Of(name_);
    if (is_writing_ || ended_ || now == told_) return;
    told_ = now;
    is_writing_ = true;
    message_.set_value(now);
    StartWrite(&message_);
  }

 private:
  void End(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(service_.mutex_) {
    if (std::exchange(ended_, true)) return;
    if (std::exchange(is_listed_, false)) service_.watches_.erase(place_);
    Finish(service_.services_.status.ToGrpc(status, {}));
  }
  void OnWriteDone(bool ok) override {
    const MutexLock lock(service_.mutex_);
    is_writing_ = false;
    if (ok) {
      Tell();
    } else {
      End(absl::CancelledError("the client has gone"));
    }
  }
  void OnCancel() override {
    const MutexLock lock(service_.mutex_);
    End(absl::CancelledError("the client has gone"));
  }
  void OnDone() override { delete this; }

  HealthService& service_;
  std::string name_;
  std::list<Watch*>::iterator place_;
  bool is_listed_ = false;
  bool is_writing_ = false;
  bool ended_ = false;
  int told_ = 0;  // nothing
  Response message_;
};

HealthService::HealthService(const ServiceContext& services) : Service(services) {
  Unary("/grpc.health.v1.Health/Check", &HealthService::Check, Access::kPublic);
  ServerStream<Request, Response>(
      "/grpc.health.v1.Health/Watch",
      [this](grpc::CallbackServerContext*, const Caller&,
             const absl::StatusOr<const Request*>& request) { return new Watch(*this, request); },
      Access::kPublic);
}

grpc::ServerUnaryReactor* HealthService::Check(grpc::CallbackServerContext* context, const Caller&,
                                               const Request* request, Response* response) {
  Serving serving;
  {
    const MutexLock lock(mutex_);
    serving = Of(request->value());
  }
  if (serving == kServiceUnknown) {
    return Answer(services_, context, absl::NotFoundError("the daemon has no health of this name"));
  }
  response->set_value(serving);
  return Answer(services_, context, absl::OkStatus());
}

void HealthService::SetServing(const std::string& name, bool is_serving) {
  const MutexLock lock(mutex_);
  if (!is_final_) Set(name, is_serving ? kServing : kNotServing);
}

void HealthService::SetNothingServing() {
  const MutexLock lock(mutex_);
  is_final_ = true;
  for (const auto& [name, serving] : std::map(serving_)) Set(name, kNotServing);
}

HealthService::Serving HealthService::Of(const std::string& name) const {
  const auto found = serving_.find(name);
  return found == serving_.end() ? kServiceUnknown : found->second;
}

void HealthService::Set(const std::string& name, Serving serving) {
  if (const auto [entry, is_new] = serving_.try_emplace(name, serving); !is_new) {
    if (std::exchange(entry->second, serving) == serving) return;
  }
  for (Watch* watch : watches_) {
    if (watch->name() == name) watch->Tell();
  }
}

}  // namespace spillway

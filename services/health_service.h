#pragma once

#include <list>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "google/protobuf/wrappers.pb.h"
#include "host/base/mutex.h"
#include "services/service.h"

namespace spillway {

// gRPC's health service, grpc.health.v1.Health, which needs no token. gRPC has one of its own, but
// that lets clients without a token open calls without limit. Thread-safe.
class HealthService final : public Service {
 public:
  // Most Watch calls at the same time; with one more, the oldest ends.
  static constexpr size_t kWatchCountMax = 256;

  // Knows no names until SetServing().
  explicit HealthService(const ServiceContext& services);

  // Tells who asks about this name, and those who watch it. Names are "" for the whole server, and
  // those of its parts.
  void SetServing(const std::string& name, bool is_serving) ABSL_LOCKS_EXCLUDED(mutex_);
  // The same for all names; later calls of SetServing() do nothing.
  void SetNothingServing() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // On the wire the same as HealthCheckRequest and HealthCheckResponse, which have one field each.
  using Request = google::protobuf::StringValue;
  using Response = google::protobuf::Int32Value;
  // HealthCheckResponse.ServingStatus.
  enum Serving { kServing = 1, kNotServing = 2, kServiceUnknown = 3 };
  class Watch;

  grpc::ServerUnaryReactor* Check(grpc::CallbackServerContext* context, const Caller& caller,
                                  const Request* request, Response* response)
      ABSL_LOCKS_EXCLUDED(mutex_);
  Serving Of(const std::string& name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Set(const std::string& name, Serving serving) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  bool is_final_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<std::string, Serving, std::less<>> serving_ ABSL_GUARDED_BY(mutex_);
  std::list<Watch*> watches_ ABSL_GUARDED_BY(mutex_);  // oldest first
};

}  // namespace spillway

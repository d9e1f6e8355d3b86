// Serves the bare echo, and an append that drops its data, on the target given as the only
// argument. Ends when its standard input closes.
#include <unistd.h>

#include <chrono>
#include <iostream>
#include <string>

#include "bench/rpc/echo.grpc.pb.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "spillway/v1/attention_service.grpc.pb.h"

namespace spillway::bench {
namespace {

void Answer(const EchoRequest& request, EchoResponse& response) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point end =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(
                         std::chrono::duration<double, std::micro>(request.busy_us()));
  while (Clock::now() < end) {
  }
  response.mutable_data()->assign(static_cast<size_t>(request.response_bytes()), 'e');
}

class StreamReactor final : public grpc::ServerBidiReactor<EchoRequest, EchoResponse> {
 public:
  StreamReactor() { StartRead(&request_); }

  void OnReadDone(bool ok) override {
    if (!ok) {
      Finish(grpc::Status::OK);
      return;
    }
    Answer(request_, response_);
    StartWrite(&response_);
  }

  void OnWriteDone(bool ok) override {
    if (!ok) {
      Finish(grpc::Status::CANCELLED);
      return;
    }
    StartRead(&request_);
  }

  void OnDone() override { delete this; }

 private:
  EchoRequest request_;
  EchoResponse response_;
};

// Reads the chunks that a client appends, and drops them.
class SinkReactor final : public grpc::ServerReadReactor<v1::AppendRequest> {
 public:
  SinkReactor() { StartRead(&request_); }

  void OnReadDone(bool ok) override {
    if (ok) {
      StartRead(&request_);
    } else {
      Finish(grpc::Status::OK);
    }
  }

  void OnDone() override { delete this; }

 private:
  v1::AppendRequest request_;
};

class SinkServer final : public v1::AttentionService::CallbackService {
  grpc::ServerReadReactor<v1::AppendRequest>* Append(grpc::CallbackServerContext*,
                                                     v1::AppendResponse*) override {
    return new SinkReactor();
  }
};

class EchoServer final : public EchoService::CallbackService {
  grpc::ServerUnaryReactor* Echo(grpc::CallbackServerContext* context, const EchoRequest* request,
                                 EchoResponse* response) override {
    Answer(*request, *response);
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  grpc::ServerBidiReactor<EchoRequest, EchoResponse>* EchoStream(
      grpc::CallbackServerContext*) override {
    return new StreamReactor();
  }
};

int Main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: rpc_echo_server TARGET\n";
    return 2;
  }
  EchoServer service;
  SinkServer sink;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(argv[1], grpc::InsecureServerCredentials());
  builder.RegisterService(&service);
  builder.RegisterService(&sink);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) {
    std::cerr << "rpc_echo_server: cannot listen on " << argv[1] << '\n';
    return 1;
  }
  char byte;
  while (read(STDIN_FILENO, &byte, 1) > 0) {
  }
  server->Shutdown();
  return 0;
}

}  // namespace
}  // namespace spillway::bench

int main(int argc, char** argv) { return spillway::bench::Main(argc, argv); }

// Measures bulk appends: one layer, with the shape of an 8B model, to the daemon. Compares them
// with a server that reads the same messages and drops them, which shows how fast the client can
// send.
//
// Both use the client's chunking and the same writes, and their rounds alternate. The last tokens
// of every sequence are appended again: the daemon accepts this as a retry only if their bytes are
// equal. Prints one JSON object.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "bench/rpc/server_pair.h"
#include "cli/cleanup.h"
#include "cli/random_rows.h"
#include "grpcpp/create_channel.h"
#include "nlohmann/json.hpp"
#include "spillway/client.h"
#include "spillway/error.h"
#include "spillway/kv_chunker.h"
#include "spillway/v1/attention_service.grpc.pb.h"

namespace spillway::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kKvHeads = 8;
constexpr int kQueryHeads = 32;
constexpr int kHeadDim = 128;

struct Options {
  std::string spillwayd;
  std::string echo_server;
  std::string device = "cpu";
  int64_t token_count = 131072;
  int round_count = 5;
};

double Median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<ptrdiff_t>(x.size() / 2), x.end());
  return x[x.size() / 2];
}

// Sends rows in messages of at most message_bytes. Returns the seconds.
absl::StatusOr<double> Send(v1::AttentionService::Stub& stub, const KvRows& rows,
                            int64_t message_bytes, v1::AppendResponse& response) {
  const absl::Time start = absl::Now();
  absl::StatusOr<KvChunker> chunker = KvChunker::Create(rows, message_bytes);
  if (!chunker.ok()) return chunker.status();
  grpc::ClientContext context;
  const auto writer = stub.Append(&context, &response);
  v1::AppendRequest request;
  while (chunker->Next(*request.mutable_chunk()) && writer->Write(request)) {
  }
  writer->WritesDone();
  if (const grpc::Status status = writer->Finish(); !status.ok()) return ToAbslStatus(status);
  return absl::ToDoubleSeconds(absl::Now() - start);
}

// A copy of the rows [H_kv][token_count][d] without the first `skipped` tokens.
std::string Tail(std::string_view rows, int64_t token_count, int64_t skipped) {
  const size_t token_bytes = size_t{kHeadDim} * 2;
  std::string tail;
  for (size_t h = 0; h < kKvHeads; ++h) {
    const size_t head = h * static_cast<size_t>(token_count) * token_bytes;
    tail += rows.substr(head + static_cast<size_t>(skipped) * token_bytes,
                        static_cast<size_t>(token_count - skipped) * token_bytes);
  }
  return tail;
}

// Appends the rows to a new sequence. Returns the seconds.
absl::StatusOr<double> AppendOnce(Client& client, v1::AttentionService::Stub& stub, KvRows rows,
                                  const std::string& model) {
  cli::TemporaryResources resources(client);
  v1::Sequence spec;
  spec.set_model(model);
  const auto sequence = client.CreateSequence("", spec);
  if (!sequence.ok()) return sequence.status();
  resources.OwnSequence(sequence->name());
  rows.sequence = sequence->name();
  const int64_t message_bytes = client.server_info().limits().message_bytes_max();
  v1::AppendResponse response;
  const absl::StatusOr<double> seconds = Send(stub, rows, message_bytes, response);
  if (!seconds.ok()) return seconds.status();
  // The daemon refuses rows that differ from those it has. Equal rows change nothing.
  const int64_t skipped = rows.token_count - std::min<int64_t>(rows.token_count, 500);
  const std::string k = Tail(rows.k, rows.token_count, skipped);
  const std::string v = Tail(rows.v, rows.token_count, skipped);
  KvRows again = rows;
  again.token_start = skipped;
  again.token_count = rows.token_count - skipped;
  again.k = k;
  again.v = v;
  v1::AppendResponse repeated;
  if (const auto status = Send(stub, again, message_bytes, repeated); !status.ok()) {
    return status.status();
  }
  if (repeated.appended_chunk_count() != 0 || response.layer_token_counts(0) != rows.token_count) {
    return absl::InternalError("the daemon does not hold what was sent");
  }
  return *seconds;
}

absl::StatusOr<Json> Run(const Options& options) {
  const auto servers = ServerPair::Start(options.spillwayd, options.device, options.echo_server);
  if (!servers.ok()) return servers.status();
  Client& client = (*servers)->client();
  const auto stub_of = [](const std::string& target) {
    return v1::AttentionService::NewStub(
        grpc::CreateChannel(target, grpc::InsecureChannelCredentials()));
  };
  const auto daemon_stub = stub_of((*servers)->daemon_target());
  const auto sink_stub = stub_of((*servers)->echo_target());

  cli::TemporaryResources resources(client);
  v1::Model spec;
  spec.set_layer_count(1);
  spec.set_query_head_count(kQueryHeads);
  spec.set_kv_head_count(kKvHeads);
  spec.set_head_dim(kHeadDim);
  spec.set_dtype(v1::DTYPE_BF16);
  spec.mutable_hash_weights()->mutable_rotation();
  const auto model = client.CreateModel("", spec);
  if (!model.ok()) return model.status();
  resources.OwnModel(model->name());

  cli::RandomRows random(v1::DTYPE_BF16, 1, 1);
  const size_t size = static_cast<size_t>(options.token_count) * kKvHeads * kHeadDim;
  const std::string k = random.Draw(size);
  const std::string v = random.Draw(size);
  KvRows rows{.sequence = "sequences/none",
              .layer_count = 1,
              .token_count = options.token_count,
              .kv_head_count = kKvHeads,
              .head_dim = kHeadDim,
              .dtype = v1::DTYPE_BF16,
              .k = k,
              .v = v};
  const int64_t message_bytes = client.server_info().limits().message_bytes_max();
  std::vector<double> appended, sent;
  // The first round does not count, because it commits memory and, with a GPU, pins it.
  for (int round = 0; round <= options.round_count; ++round) {
    const absl::StatusOr<double> seconds = AppendOnce(client, *daemon_stub, rows, model->name());
    if (!seconds.ok()) return seconds.status();
    v1::AppendResponse response;
    const absl::StatusOr<double> dropped = Send(*sink_stub, rows, message_bytes, response);
    if (!dropped.ok()) return dropped.status();
    if (round == 0) continue;
    appended.push_back(*seconds);
    sent.push_back(*dropped);
  }
  const double bytes = 4.0 * static_cast<double>(size);
  return Json{{"benchmark", "append"},
              {"device", client.server_info().devices(0).description()},
              {"tokens", options.token_count},
              {"bytes", bytes},
              {"rounds", options.round_count},
              {"append_gb_per_s", bytes / Median(appended) * 1e-9},
              {"sink_gb_per_s", bytes / Median(sent) * 1e-9},
              {"share", Median(sent) / Median(appended)}};
}

int Main(int argc, char** argv) {
  const std::filesystem::path here = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  Options options;
  options.spillwayd = (here / "../../daemon/spillwayd").lexically_normal().string();
  options.echo_server = (here / "rpc_echo_server").string();
  CLI::App app("Bulk appends, against what the client can send.", "append_bench");
  app.add_option("--spillwayd", options.spillwayd, "the daemon to start");
  app.add_option("--echo-server", options.echo_server, "the server that drops what it reads");
  app.add_option("--device", options.device, "the daemon's");
  app.add_option("--tokens", options.token_count, "of the layer")->check(CLI::Range(1, 1 << 22));
  app.add_option("--rounds", options.round_count, "measured")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  const absl::StatusOr<Json> result = Run(options);
  if (!result.ok()) {
    std::cerr << "append_bench: " << result.status() << '\n';
    return 1;
  }
  std::cout << result->dump() << '\n';
  return 0;
}

}  // namespace
}  // namespace spillway::bench

int main(int argc, char** argv) { return spillway::bench::Main(argc, argv); }

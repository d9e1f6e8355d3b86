// A client made of the stubs that protoc generates: appends a prompt, attends, decodes a token.
//
//   stubs HOST:PORT AUTHORITY.pem TOKEN
//
// README.md beside this file says how it is built.
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "spillway/v1/attention_service.grpc.pb.h"
#include "spillway/v1/model_service.grpc.pb.h"
#include "spillway/v1/sequence_service.grpc.pb.h"

namespace v1 = spillway::v1;

constexpr int kTokens = 3000, kQueryHeads = 4, kKvHeads = 2, kDim = 64;

// The metadata and the deadline of a call.
struct Context : grpc::ClientContext {
  explicit Context(const std::string& token) {
    AddMetadata("authorization", "Bearer " + token);
    set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
  }
};

void Check(const std::string& what, const grpc::Status& status) {
  if (status.ok()) return;
  std::cerr << what << ": " << status.error_message() << '\n';
  std::exit(1);
}

// float32 elements are sent as they are in the memory of a little-endian machine, in C order.
void Fill(v1::Tensor& tensor, const std::vector<int>& shape, const std::vector<float>& values) {
  for (const int size : shape) tensor.add_shape(size);
  tensor.set_dtype(v1::DTYPE_F32);
  tensor.set_data(values.data(), values.size() * sizeof(float));
}

std::vector<float> Normal(size_t count) {
  static std::mt19937 random(0);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& x : values) x = normal(random);
  return values;
}

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: stubs HOST:PORT AUTHORITY.pem TOKEN\n";
    return 2;
  }
  std::stringstream authority;
  authority << std::ifstream(argv[2]).rdbuf();
  const std::string token = argv[3];
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = authority.str();
  const auto channel = grpc::CreateChannel(argv[1], grpc::SslCredentials(options));
  const auto models = v1::ModelService::NewStub(channel);
  const auto sequences = v1::SequenceService::NewStub(channel);
  const auto attention = v1::AttentionService::NewStub(channel);

  v1::CreateModelRequest create_model;
  v1::Model& model = *create_model.mutable_model();
  model.set_layer_count(1);
  model.set_query_head_count(kQueryHeads);
  model.set_kv_head_count(kKvHeads);
  model.set_head_dim(kDim);
  model.set_dtype(v1::DTYPE_F32);
  model.mutable_hash_weights()->mutable_rotation();
  v1::CreateModelResponse made_model;
  {
    Context context(token);
    Check("CreateModel", models->CreateModel(&context, create_model, &made_model));
  }
  v1::CreateSequenceRequest create_sequence;
  create_sequence.mutable_sequence()->set_model(made_model.model().name());
  v1::CreateSequenceResponse made_sequence;
  {
    Context context(token);
    Check("CreateSequence", sequences->CreateSequence(&context, create_sequence, &made_sequence));
  }
  const v1::Sequence& sequence = made_sequence.sequence();

  // The prompt: K and V [layers, H_kv, T, d]. A message has at most 4 MiB, so longer prompts are
  // cut by layers and tokens.
  const std::vector<float> k = Normal(kKvHeads * kTokens * kDim), v = Normal(k.size());
  v1::AppendRequest append;
  append.mutable_chunk()->set_sequence(sequence.name());
  Fill(*append.mutable_chunk()->mutable_k(), {1, kKvHeads, kTokens, kDim}, k);
  Fill(*append.mutable_chunk()->mutable_v(), {1, kKvHeads, kTokens, kDim}, v);
  v1::AppendResponse appended;
  {
    Context context(token);
    const auto writer = attention->Append(&context, &appended);
    writer->Write(append);
    writer->WritesDone();
    Check("Append", writer->Finish());
  }

  std::vector<float> q;  // [T, H_q, d]: each query head looks for one of its keys
  for (int head = 0; head < kQueryHeads; ++head) {
    const float* key = k.data() + (head / (kQueryHeads / kKvHeads) * kTokens + 1234) * kDim;
    q.insert(q.end(), key, key + kDim);
  }
  v1::AttendRequest attend;
  attend.add_items()->set_sequence(sequence.name());
  Fill(*attend.mutable_items(0)->mutable_q(), {1, kQueryHeads, kDim}, q);
  v1::AttendResponse answer;
  {
    Context context(token);
    Check("Attend", attention->Attend(&context, attend, &answer));
  }
  std::cout << "attended to " << kTokens << " tokens; certified error of head 0: "
            << answer.results(0).certificate().relative_errors(0) << '\n';

  // A decode step: it begins once, and then each layer is one message, for all sequences of the
  // batch.
  {
    Context context(token);
    const auto stream = attention->Step(&context);
    v1::StepRequest begin;
    v1::DecodeStep& step = *begin.mutable_begin();
    step.set_token_count(1);
    v1::DecodeStep::Part& part = *step.add_parts();
    part.set_sequence(sequence.name());
    part.set_token_start(kTokens);
    part.set_generation(sequence.generation());
    v1::StepRequest layer;
    const std::vector<float> row = Normal(kKvHeads * kDim);
    Fill(*layer.mutable_attend()->mutable_q(), {1, 1, kQueryHeads, kDim}, q);
    Fill(*layer.mutable_attend()->mutable_k(), {1, 1, kKvHeads, kDim}, row);
    Fill(*layer.mutable_attend()->mutable_v(), {1, 1, kKvHeads, kDim}, row);
    stream->Write(begin);
    stream->Write(layer);
    stream->WritesDone();
    v1::StepResponse response;
    while (stream->Read(&response)) {
      if (response.status().code() != 0) {
        std::cerr << "layer " << response.layer() << ": " << response.status().message() << '\n';
        return 1;
      }
      std::cout << "decoded token " << kTokens << ": " << response.out().data().size()
                << " bytes of output\n";
    }
    Check("Step", stream->Finish());
  }

  v1::DeleteSequenceRequest delete_sequence;
  delete_sequence.set_name(sequence.name());
  v1::DeleteSequenceResponse deleted_sequence;
  Context context(token);
  Check("DeleteSequence", sequences->DeleteSequence(&context, delete_sequence, &deleted_sequence));
  v1::DeleteModelRequest delete_model;
  delete_model.set_name(made_model.model().name());
  v1::DeleteModelResponse deleted_model;
  Context last(token);
  Check("DeleteModel", models->DeleteModel(&last, delete_model, &deleted_model));
}

// An engine in this process: appends 3,000 tokens of one layer, attends to them, and prints what
// the answer promises. Built against an installed libspillway, see README.md beside this file.
#include <spillway.h>

#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "spillway/v1/attention_service.pb.h"
#include "spillway/v1/model_service.pb.h"
#include "spillway/v1/sequence_service.pb.h"

namespace v1 = spillway::v1;

constexpr int kTokens = 3000, kQueryHeads = 8, kKvHeads = 2, kDim = 64;

[[noreturn]] void Fail(const std::string& what, const char* message) {
  std::cerr << what << ": " << message << '\n';
  std::exit(1);
}

// A call of a method that takes one message and answers with one.
template <typename Response, typename Request>
Response Call(spillway_channel* channel, const std::string& method, const Request& request) {
  spillway_call* call =
      spillway_call_open(channel, ("/spillway.v1." + method).c_str(), 60, nullptr, 0);
  const std::string sent = request.SerializeAsString();
  spillway_call_send(call, sent.data(), sent.size(), -1);
  spillway_call_send_end(call);
  Response response;
  const void* message = nullptr;
  size_t size = 0;
  while (spillway_call_receive(call, -1, &message, &size) == SPILLWAY_RECEIVED) {
    response.ParseFromArray(message, static_cast<int>(size));
  }
  const char* text = nullptr;
  const void* details = nullptr;
  if (spillway_call_status(call, &text, &details, &size) != 0) Fail(method, text);
  spillway_call_close(call);
  return response;
}

void Fill(v1::Tensor& tensor, const std::vector<int>& shape, const std::vector<float>& values) {
  for (const int size : shape) tensor.add_shape(size);
  tensor.set_dtype(v1::DTYPE_F32);
  tensor.set_data(values.data(), values.size() * sizeof(float));
}

int main() {
  const char* settings[] = {"memory.limit=256MiB", "device.name=cpu"};
  spillway_channel* channel = spillway_channel_embed(settings, 2);
  if (channel == nullptr) {
    const char* message = nullptr;
    const void* details = nullptr;
    size_t size = 0;
    spillway_error(&message, &details, &size);
    Fail("no engine", message);
  }

  v1::CreateModelRequest model;
  model.mutable_model()->set_layer_count(1);
  model.mutable_model()->set_query_head_count(kQueryHeads);
  model.mutable_model()->set_kv_head_count(kKvHeads);
  model.mutable_model()->set_head_dim(kDim);
  model.mutable_model()->set_dtype(v1::DTYPE_F32);
  model.mutable_model()->mutable_hash_weights()->mutable_rotation();
  v1::CreateSequenceRequest sequence;
  sequence.mutable_sequence()->set_model(
      Call<v1::CreateModelResponse>(channel, "ModelService/CreateModel", model).model().name());
  const std::string name =
      Call<v1::CreateSequenceResponse>(channel, "SequenceService/CreateSequence", sequence)
          .sequence()
          .name();

  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  std::vector<float> k(kKvHeads * kTokens * kDim), v(k.size());  // [H_kv, T, d]
  for (float& x : k) x = normal(random);
  for (float& x : v) x = normal(random);
  v1::AppendRequest append;
  append.mutable_chunk()->set_sequence(name);
  Fill(*append.mutable_chunk()->mutable_k(), {1, kKvHeads, kTokens, kDim}, k);
  Fill(*append.mutable_chunk()->mutable_v(), {1, kKvHeads, kTokens, kDim}, v);
  Call<v1::AppendResponse>(channel, "AttentionService/Append", append);

  std::vector<float> q;  // [T, H_q, d]: each query head looks for one of its keys
  for (int head = 0; head < kQueryHeads; ++head) {
    const float* key = k.data() + (head / (kQueryHeads / kKvHeads) * kTokens + 1234) * kDim;
    q.insert(q.end(), key, key + kDim);
  }
  v1::AttendRequest attend;
  attend.add_items()->set_sequence(name);
  Fill(*attend.mutable_items(0)->mutable_q(), {1, kQueryHeads, kDim}, q);
  const auto answer = Call<v1::AttendResponse>(channel, "AttentionService/Attend", attend);
  const v1::AttendResult& result = answer.results(0);
  std::cout << "attended to " << kTokens
            << " tokens; certified error of head 0: " << result.certificate().relative_errors(0)
            << '\n';
  spillway_channel_close(channel);
}

#include <iostream>
#include <random>
#include <vector>

#include "spillway/client.h"
#include "spillway/tensor.h"

namespace v1 = spillway::v1;

// Appends 5,000 tokens of one layer and attends to them.
absl::Status Run() {
  auto connected = spillway::Client::Connect(spillway::DefaultTarget());
  if (!connected.ok()) return connected.status();
  spillway::Client& client = **connected;

  v1::Model spec;
  spec.set_layer_count(1);
  spec.set_query_head_count(8);
  spec.set_kv_head_count(2);
  spec.set_head_dim(64);
  spec.set_dtype(v1::DTYPE_F32);
  spec.mutable_hash_weights()->mutable_rotation();  // without codes, attention is dense
  auto model = client.CreateModel("", spec);
  if (!model.ok()) return model.status();
  v1::Sequence wanted;
  wanted.set_model(model->name());
  auto sequence = client.CreateSequence("", wanted);
  if (!sequence.ok()) return sequence.status();

  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  std::vector<float> k(2 * 5000 * 64), v(k.size());  // [H_kv, T, d]
  for (float& x : k) x = normal(random);
  for (float& x : v) x = normal(random);
  // [T, H_q, d]: each head looks for the key of token 1234. The factor makes attention peaked.
  std::vector<float> q;
  for (int head = 0; head < 8; ++head) {
    const float* key = k.data() + (head / 4 * 5000 + 1234) * 64;
    for (int i = 0; i < 64; ++i) q.push_back(2 * key[i]);
  }
  const auto bytes = [](const std::vector<float>& x) {
    return std::string_view(reinterpret_cast<const char*>(x.data()), x.size() * sizeof(float));
  };
  auto appended = client.Append({.sequence = sequence->name(),
                                 .layer_count = 1,
                                 .token_count = 5000,
                                 .kv_head_count = 2,
                                 .head_dim = 64,
                                 .dtype = v1::DTYPE_F32,
                                 .k = bytes(k),
                                 .v = bytes(v)});
  if (!appended.ok()) return appended.status();

  v1::AttendRequest request;
  v1::AttendItem& item = *request.add_items();
  item.set_sequence(sequence->name());
  *item.mutable_q() = spillway::MakeTensor({1, 8, 64}, q);
  auto response = client.Attend(request);
  if (!response.ok()) return response.status();
  const v1::AttendResult& result = response->results(0);
  std::cout << "certified error of head 0: " << result.certificate().relative_errors(0) << ", "
            << result.statistics().touched_row_counts(0) << " rows of 5000 read\n";

  absl::Status deleted = client.DeleteSequence(sequence->name());
  deleted.Update(client.DeleteModel(model->name()));
  return deleted;
}

int main() {
  const absl::Status status = Run();
  if (!status.ok()) std::cerr << status << '\n';
  return status.ok() ? 0 : 1;
}

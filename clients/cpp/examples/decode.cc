// A runner in C++: decodes greedily with a small Llama from a Hugging Face folder. The model in
// llama.h computes queries, keys and values; Spillway computes attention. Spillway keeps K and V in
// this process or in a daemon, and is called through libspillway: messages of spillway.v1 create
// the model and the sequence, and steps append and attend, layer by layer.
//
//   decode_example FOLDER ID... [--tokens 40] [--target unix:/run/spillway.sock]
//
// ID...: token ids of the prompt. Prints the ids of the new tokens.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "checkpoint.h"
#include "host/base/status_macros.h"
#include "llama.h"
#include "spillway.h"
#include "spillway/v1/attention_service.pb.h"
#include "spillway/v1/model_service.pb.h"
#include "spillway/v1/sequence_service.pb.h"

namespace {

namespace v1 = spillway::v1;

// Most new tokens of one step.
constexpr size_t kStepTokenCountMax = 16;

template <auto kFree>
struct Free {
  void operator()(auto* handle) const { kFree(handle); }
};
using Channel = std::unique_ptr<spillway_channel, Free<spillway_channel_close>>;
using Call = std::unique_ptr<spillway_call, Free<spillway_call_close>>;
using Step = std::unique_ptr<spillway_step, Free<spillway_step_end>>;

// The error of the last function that failed in this thread.
absl::Status LastError() {
  const char* message = nullptr;
  const void* details = nullptr;
  size_t size = 0;
  const int code = spillway_error(&message, &details, &size);
  return absl::Status(static_cast<absl::StatusCode>(code), message);
}

// Sends the message of a call, and waits for the answer.
template <typename Response, typename Request>
absl::StatusOr<Response> Ask(spillway_call* call, const Request& request) {
  const std::string sent = request.SerializeAsString();
  spillway_call_send(call, sent.data(), sent.size(), -1);  // if this fails, receive tells why
  spillway_call_send_end(call);
  const void* data = nullptr;
  size_t size = 0;
  if (spillway_call_receive(call, /*timeout_seconds=*/-1, &data, &size) == SPILLWAY_RECEIVED) {
    Response response;
    if (response.ParseFromArray(data, static_cast<int>(size))) return response;
    return absl::InternalError("an answer is no message of spillway.v1");
  }
  const char* message = nullptr;
  const int code = spillway_call_status(call, &message, &data, &size);
  if (code == 0) return absl::InternalError("a call ended without an answer");
  return absl::Status(static_cast<absl::StatusCode>(code), message);
}

// A sequence in Spillway: K and V of all tokens so far, in all layers.
class Sequence {
 public:
  Sequence() = default;
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  // Deletes the sequence and the model, because a daemon would keep them.
  ~Sequence() {
    step_.reset();
    v1::DeleteSequenceRequest sequence;
    sequence.set_name(name_);
    v1::DeleteModelRequest model;
    model.set_name(model_);
    if (!name_.empty()) {
      Tell<v1::DeleteSequenceResponse>("SequenceService/DeleteSequence", sequence).IgnoreError();
    }
    if (!model_.empty()) {
      Tell<v1::DeleteModelResponse>("ModelService/DeleteModel", model).IgnoreError();
    }
  }

  // target: "embedded:", or a daemon's address. settings: for an embedded engine, "name=value".
  absl::Status Open(const std::string& target, const std::vector<std::string>& settings,
                    const Config& config) {
    const bool embedded = target == "embedded:";
    if (!embedded && !settings.empty()) {
      return absl::InvalidArgumentError("--setting is for embedded:, not for " + target);
    }
    std::vector<const char*> texts;
    for (const std::string& setting : settings) texts.push_back(setting.c_str());
    channel_.reset(embedded ? spillway_channel_embed(texts.data(), texts.size())
                            : spillway_channel_open(target.c_str(), nullptr));
    if (channel_ == nullptr) return LastError();

    v1::CreateModelRequest model;
    v1::Model& spec = *model.mutable_model();
    spec.set_layer_count(static_cast<int32_t>(config.layer_count));
    spec.set_query_head_count(static_cast<int32_t>(config.head_count));
    spec.set_kv_head_count(static_cast<int32_t>(config.kv_head_count));
    spec.set_head_dim(static_cast<int32_t>(config.head_dim));
    spec.set_dtype(v1::DTYPE_F32);
    spec.mutable_hash_weights()->mutable_rotation();
    ASSIGN_OR_RETURN(const auto made_model,
                     Tell<v1::CreateModelResponse>("ModelService/CreateModel", model));
    model_ = made_model.model().name();
    v1::CreateSequenceRequest sequence;
    sequence.mutable_sequence()->set_model(model_);
    ASSIGN_OR_RETURN(const auto made_sequence,
                     Tell<v1::CreateSequenceResponse>("SequenceService/CreateSequence", sequence));
    name_ = made_sequence.sequence().name();
    shape_ = {static_cast<int32_t>(config.head_count), static_cast<int32_t>(config.kv_head_count),
              static_cast<int32_t>(config.head_dim), SPILLWAY_F32};
    return absl::OkStatus();
  }

  int64_t token_count() const { return token_count_; }

  // Begins a step of new_token_count tokens. Attend() must then be called once for each layer.
  // exact: the tokens attend to all earlier tokens; otherwise as the default policy says.
  absl::Status Begin(int64_t new_token_count, bool exact) {
    v1::DecodeStep description;
    description.add_parts()->set_sequence(name_);
    description.mutable_parts(0)->set_token_start(token_count_);
    description.set_token_count(static_cast<int32_t>(new_token_count));
    if (exact) description.mutable_policy()->set_selector(v1::SELECTOR_ALL);
    token_count_ += new_token_count;
    const std::string bytes = description.SerializeAsString();
    step_.reset(
        spillway_step_begin(channel_.get(), bytes.data(), bytes.size(), &shape_, SPILLWAY_BEST));
    return step_ != nullptr ? absl::OkStatus() : LastError();
  }

  // Appends k and v [T, H_kv * d] of the step's tokens at a layer, and attends with q [T, H_q * d]
  // to all tokens so far. out: written, shaped like q.
  absl::Status Attend(int layer, Matrix& q, Matrix& k, Matrix& v, Matrix& out) {
    const auto place = [this](Matrix& from) {  // strides of sequences, tokens and heads, bytes
      return spillway_tensor{from.data(), 4 * from.size(), 4 * from.cols(), 4 * shape_.head_dim};
    };
    const spillway_step_tensors tensors = {SPILLWAY_F32, SPILLWAY_F32, place(q),       place(k),
                                           place(v),     place(out),   /*lse=*/nullptr};
    return spillway_step_attend(step_.get(), layer, &tensors, -1) == 0 ? absl::OkStatus()
                                                                       : LastError();
  }

 private:
  template <typename Response, typename Request>
  absl::StatusOr<Response> Tell(const char* method, const Request& request) {
    const std::string path = absl::StrCat("/spillway.v1.", method);
    const Call call(
        spillway_call_open(channel_.get(), path.c_str(), /*timeout_seconds=*/60, nullptr, 0));
    if (call == nullptr) return LastError();
    return Ask<Response>(call.get(), request);
  }

  Channel channel_;
  Step step_;
  std::string model_, name_;
  spillway_step_shape shape_ = {};
  int64_t token_count_ = 0;
};

absl::Status Run(const std::string& folder, const std::vector<int64_t>& prompt, int64_t token_count,
                 const std::string& target, const std::vector<std::string>& settings) {
  ASSIGN_OR_RETURN(const Checkpoint checkpoint, LoadCheckpoint(folder));
  const int64_t vocabulary_size = checkpoint.config.vocabulary_size;
  for (const int64_t id : prompt) {
    if (id >= 0 && id < vocabulary_size) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("token id ", id, " is not in [0, ", vocabulary_size, ")"));
  }
  Sequence sequence;
  RETURN_IF_ERROR(sequence.Open(target, settings, checkpoint.config));
  const Llama llama(checkpoint);
  const auto attend = [&](int layer, Matrix& q, Matrix& k, Matrix& v, Matrix& out) {
    return sequence.Attend(layer, q, k, v, out);
  };
  const auto next = [&](absl::Span<const int64_t> ids, bool exact) -> absl::StatusOr<int64_t> {
    const int64_t position = sequence.token_count();
    RETURN_IF_ERROR(sequence.Begin(static_cast<int64_t>(ids.size()), exact));
    return llama.Next(ids, position, attend);
  };
  int64_t token = 0;
  for (size_t start = 0; start < prompt.size(); start += kStepTokenCountMax) {
    const auto ids = absl::MakeConstSpan(prompt).subspan(start, kStepTokenCountMax);
    ASSIGN_OR_RETURN(token, next(ids, /*exact=*/true));
  }
  std::vector<int64_t> tokens = {token};
  while (tokens.size() < static_cast<size_t>(token_count)) {
    ASSIGN_OR_RETURN(token, next({token}, /*exact=*/false));
    tokens.push_back(token);
  }
  std::cout << absl::StrJoin(tokens, " ") << std::endl;
  return std::cout ? absl::OkStatus() : absl::DataLossError("cannot write the tokens");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Decodes greedily with a small Llama; Spillway holds K and V.", "decode_example");
  std::string folder, target = "embedded:";
  std::vector<int64_t> prompt;
  std::vector<std::string> settings;
  int64_t token_count = 40;
  app.add_option("folder", folder, "with config.json and model.safetensors")->required();
  app.add_option("ids", prompt, "the prompt's token ids")->required();
  app.add_option("--tokens", token_count, "to decode")->check(CLI::Range(1, 1 << 20));
  app.add_option("--target", target, "embedded: or a daemon's gRPC target")->capture_default_str();
  app.add_option("--setting", settings, "NAME=VALUE of an embedded engine")
      ->allow_extra_args(false);
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = Run(folder, prompt, token_count, target, settings);
  if (!status.ok()) std::cerr << "decode_example: " << status << '\n';
  return status.ok() ? 0 : 1;
}

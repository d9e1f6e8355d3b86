#include "host/codes/mlp.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "host/codes/safetensors.h"

// One compilation of this file per instruction set; see Highway's
// "Dynamic dispatch".
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "host/codes/mlp.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spillway {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// The last columns, one at a time.
void AffineScalar(const float* x, int input_dim, const float* w, const float* b, int column,
                  int output_dim, float* y) {
  const hn::CappedTag<float, 1> d;
  for (int j = column; j < output_dim; ++j) {
    auto sum = b == nullptr ? hn::Zero(d) : hn::LoadU(d, b + j);
    for (int i = 0; i < input_dim; ++i) {
      sum = hn::MulAdd(hn::Set(d, x[i]), hn::LoadU(d, w + int64_t{i} * output_dim + j), sum);
    }
    hn::StoreU(sum, d, y + j);
  }
}

// y = b + x W, W [input_dim][output_dim]; b may be null. Lanes are outputs;
// four vectors of them hide the latency of the sums.
void Affine(const float* x, int input_dim, const float* w, const float* b, int output_dim,
            float* y) {
  const hn::ScalableTag<float> d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  int j = 0;
  const auto bias = [&](int column) {
    return b == nullptr ? hn::Zero(d) : hn::LoadU(d, b + column);
  };
  for (; j + 4 * lanes <= output_dim; j += 4 * lanes) {
    auto s0 = bias(j), s1 = bias(j + lanes), s2 = bias(j + 2 * lanes), s3 = bias(j + 3 * lanes);
    for (int i = 0; i < input_dim; ++i) {
      const auto xi = hn::Set(d, x[i]);
      const float* row = w + int64_t{i} * output_dim + j;
      s0 = hn::MulAdd(xi, hn::LoadU(d, row), s0);
      s1 = hn::MulAdd(xi, hn::LoadU(d, row + lanes), s1);
      s2 = hn::MulAdd(xi, hn::LoadU(d, row + 2 * lanes), s2);
      s3 = hn::MulAdd(xi, hn::LoadU(d, row + 3 * lanes), s3);
    }
    hn::StoreU(s0, d, y + j);
    hn::StoreU(s1, d, y + j + lanes);
    hn::StoreU(s2, d, y + j + 2 * lanes);
    hn::StoreU(s3, d, y + j + 3 * lanes);
  }
  for (; j + lanes <= output_dim; j += lanes) {
    auto sum = bias(j);
    for (int i = 0; i < input_dim; ++i) {
      sum = hn::MulAdd(hn::Set(d, x[i]), hn::LoadU(d, w + int64_t{i} * output_dim + j), sum);
    }
    hn::StoreU(sum, d, y + j);
  }
  AffineScalar(x, input_dim, w, b, j, output_dim, y);
}

// z / (1 + exp(-z)) in place; padded to whole vectors. The exponent is capped
// where exp() still is finite: beyond, the result is as good as 0.
void Silu(float* z, int count) {
  const hn::ScalableTag<float> d;
  const auto one = hn::Set(d, 1.0f);
  const auto cap = hn::Set(d, 88.0f);
  for (int i = 0; i < count; i += static_cast<int>(hn::Lanes(d))) {
    const auto v = hn::LoadU(d, z + i);
    hn::StoreU(hn::Div(v, hn::Add(one, hn::Exp(d, hn::Min(hn::Neg(v), cap)))), d, z + i);
  }
}

void Linear(const float* x, int input_dim, const float* w, int output_dim, float* y) {
  Affine(x, input_dim, w, nullptr, output_dim, y);
}

void Output(const MlpLayer& layer, int head, const float* x, float* y) {
  constexpr int kHiddenDimMax = 4096;
  constexpr int kPadding = HWY_MAX_BYTES / sizeof(float);
  const int d = layer.head_dim, hidden = layer.hidden_dim, bits = layer.hash_bits;
  std::array<float, kHiddenDimMax + kPadding> z;
  Affine(x, d, layer.w1.data() + int64_t{head} * d * hidden,
         layer.b1.data() + int64_t{head} * hidden, hidden, z.data());
  std::fill(z.begin() + hidden, z.begin() + hidden + kPadding, 0.0f);
  Silu(z.data(), hidden);
  if (layer.residual) {
    for (int i = 0; i < hidden; ++i) z[i] += x[i];
  }
  const auto at = [&](const std::vector<float>& tensor, int64_t size) {
    return tensor.empty() ? nullptr : tensor.data() + head * size;
  };
  if (!layer.w3.empty()) {
    std::array<float, kHiddenDimMax + kPadding> inner;
    Affine(z.data(), hidden, at(layer.w2, int64_t{hidden} * hidden), at(layer.b2, hidden), hidden,
           inner.data());
    std::fill(inner.begin() + hidden, inner.begin() + hidden + kPadding, 0.0f);
    Silu(inner.data(), hidden);
    Affine(inner.data(), hidden, at(layer.w3, int64_t{hidden} * bits), at(layer.b3, bits), bits, y);
    return;
  }
  Affine(z.data(), hidden, at(layer.w2, int64_t{hidden} * bits), at(layer.b2, bits), bits, y);
  if (layer.residual) {
    for (int i = 0; i < bits; ++i) y[i] += z[i];
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace spillway
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace spillway {
namespace {

HWY_EXPORT(Output);
HWY_EXPORT(Linear);

constexpr int kHashBitsMax = 1024;

// Reads the tensors of one safetensors file; the first that is at fault ends it.
class WeightsReader {
 public:
  explicit WeightsReader(const SafeTensors& file) : file_(file) {}

  const absl::Status& status() const { return status_; }
  // layers.{l}.{prefix}w1 and so on, H = heads.
  MlpLayer Mlp(const ModelSpec& spec, int l, const std::string& prefix, int64_t heads);
  std::vector<uint16_t> Channels(const ModelSpec& spec, int l);

 private:
  std::vector<float> Floats(const std::string& name, std::vector<int64_t> shape) {
    if (!status_.ok()) return {};
    absl::StatusOr<std::vector<float>> tensor = file_.Load(name, shape);
    status_ = tensor.status();
    return tensor.ok() ? *std::move(tensor) : std::vector<float>();
  }

  const SafeTensors& file_;
  absl::Status status_;
};

MlpLayer WeightsReader::Mlp(const ModelSpec& spec, int l, const std::string& prefix,
                            int64_t heads) {
  const int64_t d = spec.head_dim, hidden = spec.hash.hidden_dim, bits = spec.hash.hash_bits;
  const auto name = [&](int layer, const char* tensor) {
    return absl::StrCat("layers.", layer, ".", prefix, tensor);
  };
  const bool deep = spec.hash.hidden_layer_count == 2;
  MlpLayer layer;
  layer.head_dim = spec.head_dim;
  layer.hidden_dim = spec.hash.hidden_dim;
  layer.hash_bits = spec.hash.hash_bits;
  layer.residual = spec.hash.residual;
  layer.w1 = Floats(name(l, "w1"), {heads, d, hidden});
  layer.b1 = Floats(name(l, "b1"), {heads, hidden});
  layer.w2 = Floats(name(l, "w2"), {heads, hidden, deep ? hidden : bits});
  // All layers have it or none: one that lacks it was forgotten.
  const bool first_has_b2 = file_.Contains(name(0, "b2"));
  if (deep || first_has_b2 || file_.Contains(name(l, "b2"))) {
    layer.b2 = Floats(name(l, "b2"), {heads, deep ? hidden : bits});
  }
  if (deep) {
    layer.w3 = Floats(name(l, "w3"), {heads, hidden, bits});
    layer.b3 = Floats(name(l, "b3"), {heads, bits});
  }
  if (status_.ok() && !first_has_b2 && !layer.b2.empty()) {
    status_ = absl::InvalidArgumentError(absl::StrCat("safetensors tensor \"", name(0, "b2"),
                                                      "\" is missing, though \"", name(l, "b2"),
                                                      "\" is there"));
  }
  return layer;
}

std::vector<uint16_t> WeightsReader::Channels(const ModelSpec& spec, int l) {
  const int count = spec.indices.label_channel_count;
  const std::string name = absl::StrCat("layers.", l, ".channels");
  const std::vector<int64_t> shape = {spec.kv_head_count, count};
  const absl::StatusOr<std::vector<int64_t>> loaded = file_.LoadIntegers(name, shape);
  if (!loaded.ok()) {
    status_ = loaded.status();
    return {};
  }
  std::vector<uint16_t> channels;
  for (int h = 0; h < spec.kv_head_count; ++h) {
    std::vector<bool> seen(spec.head_dim, false);
    for (int i = 0; i < count; ++i) {
      const int64_t channel = (*loaded)[h * count + i];
      if (channel < 0 || channel >= spec.head_dim || seen[channel]) {
        status_ = absl::InvalidArgumentError(
            absl::StrCat("safetensors tensor \"", name, "\" has channel ", channel, " for KV head ",
                         h, ", which is not in [0, ", spec.head_dim, ") or is there twice"));
        return {};
      }
      seen[channel] = true;
      channels.push_back(static_cast<uint16_t>(channel));
    }
  }
  return channels;
}

}  // namespace

absl::StatusOr<IndexWeights> LoadIndexWeights(const ModelSpec& spec,
                                              std::span<const std::byte> safetensors) {
  const absl::StatusOr<SafeTensors> file = SafeTensors::Parse(safetensors);
  if (!file.ok()) return file.status();
  WeightsReader reader(*file);
  IndexWeights weights;
  for (int l = 0; l < spec.layer_count && reader.status().ok(); ++l) {
    if (spec.hash.kind == HashKind::kMlp) {
      weights.mlp.push_back(reader.Mlp(spec, l, "", spec.mlp_count()));
      if (spec.hash.query_weights) {
        weights.query_mlp.push_back(reader.Mlp(spec, l, "query_", spec.query_head_count));
      }
    }
    if (spec.indices.label_channel_count > 0 && reader.status().ok()) {
      weights.channels.push_back(reader.Channels(spec, l));
    }
  }
  if (!reader.status().ok()) return reader.status();
  return weights;
}

int64_t IndexWeights::bytes() const {
  size_t bytes = 0;
  for (const std::vector<MlpLayer>* mlps : {&mlp, &query_mlp}) {
    for (const MlpLayer& m : *mlps) {
      for (const std::vector<float>* tensor : {&m.w1, &m.b1, &m.w2, &m.b2, &m.w3, &m.b3}) {
        bytes += tensor->size() * sizeof(float);
      }
    }
  }
  for (const auto& c : channels) bytes += c.size() * sizeof(uint16_t);
  return static_cast<int64_t>(bytes);
}

int64_t IndexWeights::BytesOf(const ModelSpec& spec) {
  const int64_t d = spec.head_dim, hidden = spec.hash.hidden_dim, bits = spec.hash.hash_bits;
  int64_t mlps = 0;
  if (spec.hash.kind == HashKind::kMlp) {
    mlps = spec.mlp_count() + (spec.hash.query_weights ? spec.query_head_count : 0);
  }
  const int64_t of_mlp = (d + 1) * hidden +
                         (spec.hash.hidden_layer_count - 1) * (hidden + 1) * hidden +
                         (hidden + 1) * bits;
  const int64_t channels = int64_t{spec.kv_head_count} * spec.indices.label_channel_count;
  return spec.layer_count * (mlps * of_mlp * static_cast<int64_t>(sizeof(float)) +
                             channels * static_cast<int64_t>(sizeof(uint16_t)));
}

void LinearMap(const float* x, int input_dim, const float* w, int output_dim, float* y) {
  HWY_DYNAMIC_DISPATCH(Linear)(x, input_dim, w, output_dim, y);
}

void MlpOutput(const MlpLayer& layer, int head, const float* x, float* y) {
  HWY_DYNAMIC_DISPATCH(Output)(layer, head, x, y);
}

void MlpCode(const MlpLayer& layer, int head, const float* x, uint32_t* words) {
  std::array<float, kHashBitsMax> y;
  MlpOutput(layer, head, x, y.data());
  for (int w = 0; w < layer.hash_bits / 32; ++w) {
    uint32_t word = 0;
    for (int j = 0; j < 32; ++j) word |= static_cast<uint32_t>(y[32 * w + j] > 0) << j;
    words[w] = word;
  }
}

}  // namespace spillway
#endif  // HWY_ONCE

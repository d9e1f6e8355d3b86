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
  Affine(z.data(), hidden, layer.w2.data() + int64_t{head} * hidden * bits,
         layer.b2.empty() ? nullptr : layer.b2.data() + int64_t{head} * bits, bits, y);
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

constexpr int kHashBitsMax = 1024;

}  // namespace

int64_t MlpWeights::bytes() const {
  size_t count = 0;
  for (const MlpLayer& l : layers) count += l.w1.size() + l.b1.size() + l.w2.size() + l.b2.size();
  return static_cast<int64_t>(count * sizeof(float));
}

absl::StatusOr<MlpWeights> LoadMlpWeights(const ModelSpec& spec,
                                          std::span<const std::byte> safetensors) {
  const absl::StatusOr<SafeTensors> file = SafeTensors::Parse(safetensors);
  if (!file.ok()) return file.status();
  const int64_t heads = spec.mlp_count(), d = spec.head_dim;
  const int64_t hidden = spec.hash.hidden_dim, bits = spec.hash.hash_bits;
  const bool has_b2 = file->Contains("layers.0.b2");
  MlpWeights weights;
  for (int l = 0; l < spec.layer_count; ++l) {
    MlpLayer layer{spec.head_dim,
                   spec.hash.hidden_dim,
                   spec.hash.hash_bits,
                   spec.hash.residual,
                   {},
                   {},
                   {},
                   {}};
    absl::Status status;
    const auto load = [&](const char* name, std::vector<int64_t> shape, std::vector<float>& to) {
      if (!status.ok()) return;
      absl::StatusOr<std::vector<float>> tensor =
          file->Load(absl::StrCat("layers.", l, ".", name), shape);
      if (tensor.ok()) {
        to = *std::move(tensor);
      } else {
        status = tensor.status();
      }
    };
    load("w1", {heads, d, hidden}, layer.w1);
    load("b1", {heads, hidden}, layer.b1);
    load("w2", {heads, hidden, bits}, layer.w2);
    const std::string b2 = absl::StrCat("layers.", l, ".b2");
    // All layers have it or none: one that lacks it was forgotten.
    if (has_b2 || file->Contains(b2)) load("b2", {heads, bits}, layer.b2);
    if (!status.ok()) return status;
    if (!has_b2 && !layer.b2.empty()) {
      return absl::InvalidArgumentError("safetensors tensor \"layers.0.b2\" is missing, though \"" +
                                        b2 + "\" is there");
    }
    weights.layers.push_back(std::move(layer));
  }
  return weights;
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

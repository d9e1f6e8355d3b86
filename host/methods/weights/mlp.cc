#include "host/methods/weights/mlp.h"

#include <algorithm>
#include <array>

// One compilation of this file per instruction set; see Highway's
// "Dynamic dispatch".
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "host/methods/weights/mlp.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace spillway {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// Computes the last columns of Affine(), one at a time.
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

// y = b + x W, with W [input_dim][output_dim]; b may be null. Each lane computes one output. Four
// vectors of lanes hide the latency of the sums.
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

// z / (1 + exp(-z)), in place. REQUIRES: z is padded to whole vectors. The argument of exp() is
// limited to where exp() is finite; beyond that, the result is practically 0.
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

}  // namespace

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

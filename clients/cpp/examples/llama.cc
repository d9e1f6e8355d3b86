#include "llama.h"

#include <cmath>

#include "host/base/status_macros.h"

using Row = Eigen::Array<float, 1, Eigen::Dynamic>;

Llama::Llama(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {
  const int64_t d = checkpoint.config.head_dim;
  frequencies_.resize(d / 2);
  for (int64_t i = 0; i < d / 2; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(d);
    frequencies_[i] = 1 / std::pow(checkpoint.config.rope_theta, exponent);
  }
}

// RMS norm: divides each row of x by its root mean square, and multiplies by weight [1,
// hidden_size].
Matrix Llama::Norm(const Matrix& x, const Matrix& weight) const {
  const float eps = checkpoint_.config.rms_norm_eps;
  const Eigen::ArrayXf scale = (x.array().square().rowwise().mean() + eps).rsqrt();
  return ((x.array().colwise() * scale).rowwise() * weight.row(0).array()).matrix();
}

// Rotary embedding of [T, H * d], in place. Elements i and i + d / 2 of a head are rotated as a
// pair.
void Llama::Rotate(int64_t position, Matrix& heads) const {
  const int64_t half = frequencies_.size();
  for (int64_t t = 0; t < heads.rows(); ++t) {
    const Row angles = static_cast<float>(position + t) * frequencies_;
    const Row cos = angles.cos(), sin = angles.sin();
    for (int64_t start = 0; start < heads.cols(); start += 2 * half) {
      const Row first = heads.row(t).segment(start, half);
      const Row second = heads.row(t).segment(start + half, half);
      heads.row(t).segment(start, half) = first * cos - second * sin;
      heads.row(t).segment(start + half, half) = second * cos + first * sin;
    }
  }
}

absl::StatusOr<int64_t> Llama::Next(absl::Span<const int64_t> ids, int64_t position,
                                    Attend attend) const {
  const auto count = static_cast<int64_t>(ids.size());
  Matrix x(count, checkpoint_.config.hidden_size);
  for (int64_t t = 0; t < count; ++t) x.row(t) = checkpoint_.embedding.row(ids[t]);
  int index = 0;
  for (const Layer& layer : checkpoint_.layers) {
    const Matrix into_attention = Norm(x, layer.attention_norm);
    Matrix q = into_attention * layer.q.transpose();
    Matrix k = into_attention * layer.k.transpose();
    Matrix v = into_attention * layer.v.transpose();
    Rotate(position, q);
    Rotate(position, k);
    Matrix out(q.rows(), q.cols());
    RETURN_IF_ERROR(attend(index++, q, k, v, out));
    x += out * layer.o.transpose();
    const Matrix into_mlp = Norm(x, layer.mlp_norm);
    const Matrix gate = into_mlp * layer.gate.transpose();
    const Matrix up = into_mlp * layer.up.transpose();
    const Matrix silu = gate.array() / (1 + (-gate.array()).exp());
    x += silu.cwiseProduct(up) * layer.down.transpose();
  }
  const Matrix& head = checkpoint_.config.tied ? checkpoint_.embedding : checkpoint_.head;
  const Matrix logits = Norm(x.bottomRows(1), checkpoint_.norm) * head.transpose();
  if (!logits.allFinite()) return absl::OutOfRangeError("a logit is not finite");
  Eigen::Index row = 0, token = 0;
  logits.maxCoeff(&row, &token);
  return token;
}

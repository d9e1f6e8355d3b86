#include "host/cpu/cpu_state.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "host/base/elements.h"
#include "host/base/parallel.h"
#include "host/codes/rotation.h"
#include "host/cpu/encode_sections.h"

namespace spillway {

CpuModel::CpuModel(const ModelSpec& spec, Arena* arena, IndexWeights weights)
    : spec_(spec),
      layout_(CodeLayout::Of(spec)),
      sections_(KeySections::Of(spec)),
      weights_(std::move(weights)) {
  if (!spec.has_index()) return;
  code_pool_ = std::make_unique<PagePool>(arena, layout_.page_bytes() + sections_.bytes());
  if (spec.indices.lsh_table_count > 0) {
    projections_.resize(spec.layer_count);
    ParallelFor(0, spec.layer_count,
                [&](int layer) { projections_[layer] = MakeProjections(spec, layer); });
  }
  if (spec.hash.kind != HashKind::kRotation) return;
  const int d = spec.head_dim;
  rotations_.resize(spec.layer_count);
  rotations_transposed_.resize(spec.layer_count);
  ParallelFor(0, spec.layer_count, [&](int layer) {
    rotations_[layer] = MakeRotation(d, spec.hash.seed, layer);
    std::vector<float>& transposed = rotations_transposed_[layer];
    transposed.resize(rotations_[layer].size());
    for (int i = 0; i < d; ++i) {
      for (int j = 0; j < d; ++j) transposed[i * d + j] = rotations_[layer][j * d + i];
    }
  });
}

int64_t CpuModel::BytesOf(const ModelSpec& spec) {
  const int64_t d = spec.head_dim;
  const int64_t rotations = spec.hash.kind == HashKind::kRotation ? 2 * d * d : 0;
  const int64_t projections = int64_t{spec.indices.lsh_table_count} * spec.indices.lsh_bits * d;
  return spec.layer_count * (rotations + projections) * static_cast<int64_t>(sizeof(float)) +
         IndexWeights::BytesOf(spec);
}

int64_t CpuModel::bytes() const {
  int64_t floats = 0;
  for (const auto& r : rotations_) floats += 2 * static_cast<int64_t>(r.size());
  for (const auto& p : projections_) floats += static_cast<int64_t>(p.size());
  return floats * 4 + weights_.bytes();
}

EncodeParams CpuModel::encode_params(int layer) const {
  EncodeParams p;
  p.head_dim = spec_.head_dim;
  p.bits_per_dim = spec_.hash.bits_per_dim;
  p.layout = layout_;
  if (!rotations_.empty()) {
    p.rotation = rotations_[layer].data();
    p.rotation_transposed = rotations_transposed_[layer].data();
  }
  return p;
}

CpuSequence::CpuSequence(const CpuModel& model) {
  if (!model.spec().has_index()) return;
  layers.resize(model.spec().layer_count);
  for (LayerIndex& layer : layers) {
    for (int h = 0; h < model.spec().kv_head_count; ++h) {
      layer.codes.emplace_back(model.code_pool(), kPageTokenCount);
    }
  }
}

CpuSequence::CpuSequence(const CpuSequence& source, int64_t token_count)
    : layers(source.layers.size()) {
  for (size_t l = 0; l < layers.size(); ++l) {
    const LayerIndex& from = source.layers[l];
    LayerIndex& to = layers[l];
    const int64_t count = std::min(token_count, from.token_count);
    to.centred = from.centred && count >= kCentreTokenCount;
    to.token_count = to.centred ? count : 0;
    if (to.centred) to.centre = from.centre;
    for (const PageTable& codes : from.codes) to.codes.push_back(codes.Share(to.token_count));
  }
}

int64_t CpuSequence::index_bytes() const {
  int64_t bytes = 0;
  for (const LayerIndex& layer : layers) {
    for (const PageTable& codes : layer.codes) bytes += codes.bytes();
  }
  return bytes;
}

void LayerIndex::Truncate(int64_t length) {
  if (length < kCentreTokenCount) {
    centred = false;
    centre.clear();
    token_count = 0;
  }
  token_count = std::min(token_count, length);
  for (PageTable& table : codes) table.Truncate(token_count);
}

void CpuSequence::Truncate(int64_t token_count) {
  for (LayerIndex& layer : layers) layer.Truncate(token_count);
}

absl::Status CpuSequence::PrepareAppend(int layer, int64_t start, int64_t count) {
  if (layers.empty()) return absl::OkStatus();
  LayerIndex& index = layers[layer];
  // Of an append that was undone; nothing in the ordinary case.
  index.Truncate(start);
  if (start + count < kCentreTokenCount) return absl::OkStatus();
  for (size_t h = 0; h < index.codes.size(); ++h) {
    absl::Status status = index.codes[h].PrepareWrite(index.token_count, start + count);
    if (!status.ok()) {
      for (size_t i = 0; i < h; ++i) index.codes[i].Truncate(index.token_count);
      return status;
    }
  }
  return absl::OkStatus();
}

namespace {

constexpr int kHashBitsMax = 1024;

// The mean of the first kCentreTokenCount keys of every head: fp64, token
// order, rounded once. Zero for keys that are hashed as they are.
void ComputeCentre(const ModelSpec& spec, const LayerRows& rows, LayerIndex& index) {
  const int d = spec.head_dim;
  index.centre.assign(static_cast<size_t>(spec.kv_head_count) * d, 0.0f);
  if (spec.hash.raw_keys) return;
  ParallelFor(0, spec.kv_head_count, [&](int h) {
    std::vector<double> sum(d, 0.0);
    std::vector<float> key(d);
    for (int64_t t = 0; t < kCentreTokenCount; ++t) {
      ToFloat(spec.dtype, rows.Row(h, t), d, key.data());
      for (int i = 0; i < d; ++i) sum[i] += key[i];
    }
    for (int i = 0; i < d; ++i) {
      index.centre[h * d + i] = static_cast<float>(sum[i] / kCentreTokenCount);
    }
  });
}

void EncodeMlpToken(const CpuModel& model, const MlpLayer& mlp, int h, const float* centre,
                    const std::byte* key, std::byte* page, int slot) {
  const ModelSpec& spec = model.spec();
  const int d = spec.head_dim;
  const int codes = spec.key_code_count();
  float x[kHeadDimMax];
  uint32_t words[kHashBitsMax / 32];
  uint8_t bits[kHashBitsMax];
  ToFloat(spec.dtype, key, d, x);
  for (int i = 0; i < d; ++i) x[i] -= centre[i];
  for (int c = 0; c < codes; ++c) {
    MlpCode(mlp, h * codes + c, x, words + c * spec.hash.hash_bits / 32);
  }
  for (int j = 0; j < model.layout().dims; ++j) bits[j] = (words[j / 32] >> (j % 32)) & 1u;
  StoreCode(model.layout(), bits, page, slot);
}

// Codes of tokens [begin, end) of one page of one head.
void EncodePage(const CpuModel& model, int layer, int h, const LayerRows& rows, LayerIndex& index,
                int64_t page, int begin, int end) {
  const ModelSpec& spec = model.spec();
  if (spec.hash.kind == HashKind::kNone) return;
  const std::byte* first_row = rows.Page(h, page);
  std::byte* codes = index.codes[h].Page(page);
  const float* centre = index.centre.data() + static_cast<size_t>(h) * spec.head_dim;
  if (spec.hash.kind == HashKind::kMlp) {
    for (int t = begin; t < end; ++t) {
      EncodeMlpToken(model, model.mlp(layer), h, centre, first_row + t * rows.row_bytes(), codes,
                     t);
    }
    return;
  }
  EncodeParams params = model.encode_params(layer);
  params.centre = centre;
  // One by one where a tile would mostly repeat what is there.
  if (end - begin <= 4) {
    for (int t = begin; t < end; ++t) {
      EncodeKey(params, spec.dtype, first_row + t * rows.row_bytes(), codes, t);
    }
    return;
  }
  for (int tile = begin / kTileTokenCount; tile * kTileTokenCount < end; ++tile) {
    const int from = tile * kTileTokenCount;
    EncodeTile(params, spec.dtype, first_row + from * rows.row_bytes(), rows.row_bytes(),
               std::min(kTileTokenCount, end - from), codes, tile);
  }
}

}  // namespace

void IndexAppended(const CpuModel& model, int layer, const LayerRows& rows, LayerIndex& index) {
  const int64_t n = rows.token_count();
  if (n < kCentreTokenCount) return;
  if (!index.centred) {
    ComputeCentre(model.spec(), rows, index);
    index.centred = true;
    index.token_count = 0;
  }
  const int64_t first_page = index.token_count / kPageTokenCount;
  const int64_t pages = (n + kPageTokenCount - 1) / kPageTokenCount - first_page;
  const int heads = model.spec().kv_head_count;
  const int64_t old_count = index.token_count;
  const auto encode = [&](int64_t task) {
    const int h = static_cast<int>(task / pages);
    const int64_t page = first_page + task % pages;
    const int64_t base = page * kPageTokenCount;
    const int begin = static_cast<int>(std::max<int64_t>(old_count - base, 0));
    const int end = static_cast<int>(std::min<int64_t>(n - base, kPageTokenCount));
    EncodePage(model, layer, h, rows, index, page, begin, end);
    if (!model.spec().indices.any()) return;
    EncodeSections(model, layer, h, rows.Page(h, page), begin, end,
                   index.centre.data() + static_cast<size_t>(h) * model.spec().head_dim,
                   index.codes[h].Page(page) + model.layout().page_bytes());
  };
  // A decode step's few keys are done before a worker would wake.
  if (n - old_count <= 4) {
    for (int64_t task = 0; task < pages * heads; ++task) encode(task);
  } else {
    ParallelFor(int64_t{0}, pages * heads, encode);
  }
  index.token_count = n;
}

}  // namespace spillway

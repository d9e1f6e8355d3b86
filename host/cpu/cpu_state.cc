#include "host/cpu/cpu_state.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "host/base/elements.h"
#include "host/base/parallel.h"
#include "host/base/status_macros.h"
#include "host/codes/rotation.h"
#include "host/cpu/cpu_method.h"
#include "host/cpu/decoded_rows.h"

namespace spillway {

namespace {

// Bytes of a page of a rotation's codes; 0 without a rotation.
int64_t CodePageBytes(const ModelSpec& spec) {
  return spec.hash.kind == HashKind::kRotation ? CodeLayout::Of(spec).page_bytes() : 0;
}

// Calls f(method, bytes of its section) for the methods that a model asks for.
template <typename F>
void ForEachSection(const ModelSpec& spec, F f) {
  for (const Method* method : OptionalMethods()) {
    if (method->cpu->section_bytes == nullptr) continue;
    if (const int64_t bytes = method->cpu->section_bytes(spec); bytes > 0) f(*method, bytes);
  }
}

}  // namespace

int64_t IndexPageBytes(const ModelSpec& spec) {
  int64_t total = CodePageBytes(spec);
  ForEachSection(spec, [&](const Method&, int64_t bytes) { total += bytes; });
  return total;
}

absl::StatusOr<std::unique_ptr<CpuModel>> CpuModel::Create(const ModelSpec& spec, Arena* arena,
                                                           std::span<const std::byte> safetensors,
                                                           const CancelToken* cancel) {
  std::vector<MethodIndex> indices;
  int64_t offset = CodePageBytes(spec);
  ForEachSection(spec, [&](const Method& method, int64_t bytes) {
    indices.push_back({&method, offset, nullptr});
    offset += bytes;
  });
  for (MethodIndex& of_method : indices) {
    ASSIGN_OR_RETURN(of_method.index, of_method.method->cpu->make_index(spec, safetensors, cancel));
    if (cancel != nullptr) RETURN_IF_ERROR(cancel->Check());
  }
  auto model = absl::WrapUnique(new CpuModel(spec, arena, std::move(indices)));
  RETURN_IF_ERROR(model->MakeRotations(cancel));
  return model;
}

CpuModel::CpuModel(const ModelSpec& spec, Arena* arena, std::vector<MethodIndex> method_indices)
    : spec_(spec),
      layout_(CodeLayout::Of(spec)),
      signs_(HadamardSigns::Of(spec.head_dim)),
      method_indices_(std::move(method_indices)) {
  if (!spec.has_index()) return;
  code_pool_ = std::make_unique<PagePool>(arena, IndexPageBytes(spec));
}

absl::Status CpuModel::MakeRotations(const CancelToken* cancel) {
  if (spec_.hash.kind != HashKind::kRotation) return absl::OkStatus();
  const int d = spec_.head_dim;
  rotations_.resize(spec_.layer_count);
  rotations_transposed_.resize(spec_.layer_count);
  ParallelFor(0, spec_.layer_count, [&](int layer) {
    if (cancel != nullptr && !cancel->Check().ok()) return;
    rotations_[layer] = MakeRotation(d, spec_.hash.seed, spec_.first_layer + layer);
    std::vector<float>& transposed = rotations_transposed_[layer];
    transposed.resize(rotations_[layer].size());
    for (int i = 0; i < d; ++i) {
      for (int j = 0; j < d; ++j) transposed[i * d + j] = rotations_[layer][j * d + i];
    }
  });
  return cancel == nullptr ? absl::OkStatus() : cancel->Check();
}

int64_t CpuModel::BytesOf(const ModelSpec& spec) {
  int64_t bytes = 0;
  if (spec.hash.kind == HashKind::kRotation) {
    bytes += int64_t{2} * spec.layer_count * spec.head_dim * spec.head_dim * sizeof(float);
  }
  for (const Method* method : OptionalMethods()) {
    if (method->cpu->weight_bytes != nullptr) bytes += method->cpu->weight_bytes(spec);
  }
  return bytes;
}

int64_t CpuModel::bytes() const {
  int64_t bytes = 0;
  for (const auto& r : rotations_) bytes += static_cast<int64_t>(2 * r.size() * sizeof(float));
  for (const MethodIndex& of_method : method_indices_) bytes += of_method.index->bytes();
  return bytes;
}

const MethodIndex& CpuModel::IndexOf(const Method& method) const {
  const auto found = std::find_if(method_indices_.begin(), method_indices_.end(),
                                  [&](const MethodIndex& m) { return m.method == &method; });
  assert(found != method_indices_.end());
  return *found;
}

EncodeParams CpuModel::encode_params(int layer) const {
  EncodeParams p;
  p.head_dim = spec_.head_dim;
  p.bits_per_dim = spec_.hash.bits_per_dim;
  p.layout = layout_;
  p.signs = &signs_;
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
    if (count >= kCentreTokenCount) {
      to.token_count = count;
      to.first_rows = from.first_rows;
      to.centre = from.centre;
    }
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
    first_rows.clear();
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
  // Drops what an undone append has left; usually nothing.
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

// The mean of the first kCentreTokenCount keys of every KV head: summed in fp64 in token order,
// rounded once. Zero if the model hashes raw keys.
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

// Writes what the index of a page has of values: norms and, if the model has them, value codes.
void WriteValues(const CpuModel& model, int layer, const FirstRows& first, const PageValues& values,
                 const std::byte* rows, const float* radii, std::byte* page) {
  WriteNorms(model.layout(), first, values, radii, page);
  if (model.layout().value_bits == 0) return;
  EncodeValues(model.spec(), model.encode_params(layer), values, rows, page);
}

// Writes the codes and norms of the first pages, and sets first_rows, which later pages are
// compared with.
void IndexFirstPages(const CpuModel& model, int layer, const LayerRows& rows, LayerIndex& index) {
  constexpr int64_t kPages = kFirstPageCount;
  const ModelSpec& spec = model.spec();
  index.first_rows.resize(spec.kv_head_count);
  ParallelFor(0, spec.kv_head_count, [&](int h) {
    std::vector<float> radii(kCentreTokenCount);
    std::vector<DecodedPage> pages;
    std::vector<PageValues> values;
    for (int64_t p = 0; p < kPages; ++p) {
      const std::byte* const of_page = pages.emplace_back(rows, h, p).rows();
      // Codes, but not norms.
      EncodePage(spec, model.encode_params(layer), of_page, index.codes[h].Page(p),
                 radii.data() + p * kPageTokenCount);
      values.push_back(MeasureValues(spec, of_page));
    }
    index.first_rows[h] = MeasureFirstRows(values, radii.data());
    for (int64_t p = 0; p < kPages; ++p) {
      WriteValues(model, layer, index.first_rows[h], values[p], pages[p].rows(),
                  radii.data() + p * kPageTokenCount, index.codes[h].Page(p));
    }
  });
}

}  // namespace

void IndexAppended(const CpuModel& model, int layer, const LayerRows& rows, LayerIndex& index,
                   const JobLoops& loops) {
  const int64_t n = rows.token_count();
  if (n < kCentreTokenCount) return;
  const ModelSpec& spec = model.spec();
  const bool rotation = spec.hash.kind == HashKind::kRotation;
  const bool by_methods = !model.method_indices().empty();
  if (index.token_count == 0) {
    if (by_methods) ComputeCentre(spec, rows, index);
    if (rotation) IndexFirstPages(model, layer, rows, index);
  }
  const int64_t old_count = index.token_count;
  // Pages [closed, ClosedPages(n)) get codes. Methods index all new tokens, also those of the open
  // page.
  const int64_t closed = rotation
                             ? std::max(ClosedPages(old_count), kCentreTokenCount / kPageTokenCount)
                             : ClosedPages(n);
  const int64_t first_page = by_methods ? old_count / kPageTokenCount : closed;
  const int64_t end_page =
      by_methods ? (n + kPageTokenCount - 1) / kPageTokenCount : ClosedPages(n);
  const int64_t pages = end_page - first_page;
  const auto encode = [&](int64_t task) {
    const int h = static_cast<int>(task / pages);
    const int64_t page = first_page + task % pages;
    const int64_t base = page * kPageTokenCount;
    if (page >= closed && page < ClosedPages(n)) {
      float radii[kPageTokenCount];
      const DecodedPage decoded(rows, h, page);
      EncodePage(spec, model.encode_params(layer), decoded.rows(), index.codes[h].Page(page),
                 radii);
      WriteValues(model, layer, index.first_rows[h], MeasureValues(spec, decoded.rows()),
                  decoded.rows(), radii, index.codes[h].Page(page));
    }
    if (!by_methods) return;
    const PageKeys keys{.layer = layer,
                        .kv_head = h,
                        .rows = rows.Page(h, page),
                        .begin = static_cast<int>(std::max<int64_t>(old_count - base, 0)),
                        .end = static_cast<int>(std::min<int64_t>(n - base, kPageTokenCount)),
                        .centre = index.centre.data() + static_cast<size_t>(h) * spec.head_dim};
    for (const MethodIndex& of_method : model.method_indices()) {
      of_method.index->Encode(keys, index.codes[h].Page(page) + of_method.offset_bytes);
    }
  };
  // The few keys of a decode step are done before a worker would wake.
  if (n - old_count <= 4) {
    for (int64_t task = 0; task < pages * spec.kv_head_count; ++task) encode(task);
  } else {
    loops.Run(pages * spec.kv_head_count, [&](int64_t task) {
      loops.Pause();
      encode(task);
    });
  }
  index.token_count = n;
}

}  // namespace spillway

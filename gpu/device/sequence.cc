#include "gpu/device/sequence.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <utility>

#include "host/base/status_macros.h"

namespace spillway::cuda {
namespace {

constexpr int64_t kPageCapacityMin = 64;
// Tables of addresses for each KV head: pages of rows, of the index, and to read rows from.
constexpr int64_t kPageTables = 3;
// A longer append is a whole prompt, which is not followed by another one.
constexpr int64_t kAheadTokensMax = 16384;

int64_t PagesFor(int64_t token_count) {
  return (token_count + kPageTokenCount - 1) / kPageTokenCount;
}

// Tokens that stay indexed if token_count remain.
int64_t Indexed(int64_t token_count) { return token_count < kCentreTokenCount ? 0 : token_count; }

}  // namespace

LayerIndex::LayerIndex(const CudaModel& model, BlockPools* blocks, int layer)
    : model_(&model),
      blocks_(blocks),
      resident_(model.spec(), model.row_pool(), blocks, layer),
      whole_(model.spec(), model.copy_pool(layer)),
      mirror_(kPageTables * model.spec().kv_head_count) {
  for (int h = 0; model.spec().has_index() && h < model.spec().kv_head_count; ++h) {
    codes_.emplace_back(model.code_pool(), kPageTokenCount);
  }
}

LayerIndex::LayerIndex(const CudaModel& model, BlockPools* blocks, const LayerIndex& source,
                       int64_t token_count)
    : model_(&model),
      blocks_(blocks),
      indexed_token_count_(Indexed(std::min(token_count, source.indexed_token_count_))),
      resident_(source.resident_, indexed_token_count_),
      whole_(source.whole_, token_count),
      mirror_(kPageTables * model.spec().kv_head_count) {
  if (indexed_token_count_ > 0) heads_ = source.heads_.Share();
  for (const PageTable& codes : source.codes_) codes_.push_back(codes.Share(indexed_token_count_));
}

int64_t LayerIndex::bytes() const {
  int64_t bytes = resident_.bytes();
  for (const PageTable& codes : codes_) bytes += codes.bytes();
  return bytes;
}

void LayerIndex::Truncate(int64_t token_count) {
  indexed_token_count_ = Indexed(std::min(indexed_token_count_, token_count));
  if (indexed_token_count_ == 0) heads_ = Block();
  for (PageTable& table : codes_) table.Truncate(indexed_token_count_);
  resident_.Truncate(indexed_token_count_);
  whole_.Truncate(token_count);
  // A page that is written next may be replaced first, if a fork shares it.
  synced_row_pages_ = std::min(synced_row_pages_, token_count / kPageTokenCount);
  synced_code_pages_ = std::min(synced_code_pages_, indexed_token_count_ / kPageTokenCount);
}

absl::Status LayerIndex::Reserve(int64_t token_count) { return Grow(PagesFor(token_count)); }

EncodeWork LayerIndex::Work(int64_t begin, int64_t end) const {
  const ModelSpec& spec = model_->spec();
  EncodeWork work;
  work.dtype = spec.dtype;
  work.row_type = spec.row_type;
  work.head_dim = spec.head_dim;
  work.kv_head_count = spec.kv_head_count;
  work.row_bytes = spec.row_bytes();
  work.begin = begin;
  work.end = end;
  work.row_pages = row_pages(0);
  work.row_page_capacity = capacity_;
  work.code_pages = code_pages(0);
  work.code_page_capacity = capacity_;
  work.tiling = model_->tiling();
  work.centre = centres();
  return work;
}

absl::Status LayerIndex::Prepare(int64_t start, int64_t count) {
  RETURN_IF_ERROR(Grow(PagesFor(start + count)));
  if (codes_.empty() || start + count < kCentreTokenCount) return absl::OkStatus();
  if (indexed_token_count_ == 0) {
    ASSIGN_OR_RETURN(heads_, Block::Create(blocks_->Of(HeadBytes())));
  }
  absl::Status status = resident_.Prepare(start + count);
  for (size_t h = 0; h < codes_.size() && status.ok(); ++h) {
    status = codes_[h].PrepareWrite(indexed_token_count_, start + count);
  }
  if (!status.ok()) {
    for (PageTable& codes : codes_) codes.Truncate(indexed_token_count_);
    resident_.Truncate(indexed_token_count_);
  }
  return status;
}

absl::Status LayerIndex::Grow(int64_t page_count) {
  if (page_count <= capacity_) return absl::OkStatus();
  const int64_t capacity = CapacityFor(page_count);
  ASSIGN_OR_RETURN(tables_, Block::Create(blocks_->Of(TableBytes(model_->spec(), capacity))));
  capacity_ = capacity;
  ForgetTables();
  return absl::OkStatus();
}

void LayerIndex::ForgetTables() {
  for (auto& pages : mirror_) pages.clear();
  synced_row_pages_ = synced_code_pages_ = synced_read_pages_ = 0;
  tables_new_ = true;
}

absl::Status LayerIndex::Update(const LayerRows& rows, int64_t token_count,
                                std::vector<TableUpdate>& updates) {
  const int64_t row_pages = PagesFor(token_count);
  RETURN_IF_ERROR(Grow(row_pages));
  const int heads = rows.kv_head_count();
  auto* const slots = reinterpret_cast<uint64_t*>(tables_ ? tables_.data() : nullptr);
  const auto sync = [&](int table, int64_t from, int64_t page_count, const auto& page) {
    std::vector<const std::byte*>& known = mirror_[table];
    known.resize(static_cast<size_t>(page_count), nullptr);
    for (int64_t p = from; p < page_count; ++p) {
      const std::byte* address = page(p);
      if (known[p] == address) continue;
      known[p] = address;
      updates.push_back({slots + table * capacity_ + p, reinterpret_cast<uint64_t>(address)});
    }
  };
  const int64_t read_from =
      std::min({synced_read_pages_, synced_row_pages_, whole_.TakeChangedPage()});
  for (int h = 0; h < heads; ++h) {
    sync(h, synced_row_pages_, row_pages, [&](int64_t p) { return rows.Page(h, p); });
    sync(2 * heads + h, read_from, row_pages,
         [&](int64_t p) { return p < whole_.page_count() ? whole_.Page(h, p) : rows.Page(h, p); });
    if (codes_.empty()) continue;
    sync(heads + h, synced_code_pages_, codes_[h].page_count(),
         [&](int64_t p) { return codes_[h].Page(p); });
  }
  synced_row_pages_ = synced_read_pages_ = row_pages;
  synced_code_pages_ = codes_.empty() ? 0 : codes_.front().page_count();
  resident_.Sync(resident_tables(), capacity_, tables_new_, updates);
  tables_new_ = false;
  return absl::OkStatus();
}

int64_t LayerIndex::CapacityFor(int64_t page_count) {
  return std::max(kPageCapacityMin,
                  static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(page_count))));
}

int64_t LayerIndex::TableBytes(const ModelSpec& spec, int64_t capacity) {
  const int64_t heads = spec.kv_head_count;
  const int64_t words = kPageTables * heads * capacity +
                        ResidentRowsOfLayer::TableWords(spec.has_index() ? heads : 0, capacity);
  return words * static_cast<int64_t>(sizeof(uint64_t));
}

int64_t LayerIndex::HeadBytes(const ModelSpec& spec, bool methods_encode) {
  const int64_t heads = spec.kv_head_count;
  const int64_t vector_bytes = spec.head_dim * static_cast<int64_t>(sizeof(float));
  int64_t bytes = 0;
  if (spec.hash.kind == HashKind::kRotation) {
    bytes += heads * (static_cast<int64_t>(sizeof(HeadStatistics)) + vector_bytes);
  }
  if (methods_encode) bytes += heads * vector_bytes;
  return bytes;
}

HeadIndex LayerIndex::heads() const {
  if (!model_->has_rotation()) return {};
  auto* const statistics = reinterpret_cast<HeadStatistics*>(heads_.data());
  return {statistics, reinterpret_cast<float*>(statistics + model_->spec().kv_head_count)};
}

float* LayerIndex::centres() const {
  if (!model_->methods_encode()) return nullptr;
  const int64_t floats = int64_t{model_->spec().kv_head_count} * model_->spec().head_dim;
  return reinterpret_cast<float*>(heads_.data() + HeadBytes()) - floats;
}

const HeadStatistics* LayerIndex::statistics(int kv_head) const {
  if (indexed_token_count_ == 0 || !model_->has_rotation()) return nullptr;
  return heads().statistics + kv_head;
}

const float* LayerIndex::centre(int kv_head) const {
  if (indexed_token_count_ == 0 || !model_->methods_encode()) return nullptr;
  return centres() + int64_t{kv_head} * model_->spec().head_dim;
}

const std::byte* const* LayerIndex::row_pages(int kv_head) const {
  return reinterpret_cast<const std::byte* const*>(tables_.data()) + kv_head * capacity_;
}

const std::byte* const* LayerIndex::read_pages(int kv_head) const {
  return row_pages(2 * model_->spec().kv_head_count + kv_head);
}

ResidentRows LayerIndex::resident(int kv_head) const {
  ResidentRows view = resident_.View(resident_tables(), capacity_, kv_head);
  view.whole_pages = tables_ ? read_pages(kv_head) : nullptr;
  view.whole_end = whole_.end();
  return view;
}

int64_t LayerIndex::MissingBytes(int64_t token_count) const {
  if (!whole_.Lacks(token_count)) return 0;
  const ModelSpec& spec = model_->spec();
  return (token_count - whole_.end()) * spec.kv_head_count * spec.row_bytes();
}

void LayerIndex::FillWhole(const LayerRows& rows, int64_t begin, int64_t end,
                           std::vector<RowCopy>& copies) {
  if (whole_.FirstUnfilled(end) != begin) return;
  for (int h = 0; h < rows.kv_head_count(); ++h) {
    for (int64_t token = begin; token < std::min(end, whole_.end()); ++token) {
      copies.push_back({rows.Row(h, token), whole_.Row(h, token)});
    }
  }
  whole_.SetFilled(end);
}

WholeCopy LayerIndex::FillWhole(int64_t token_count) {
  WholeCopy copy;
  copy.from = row_pages(0);
  copy.to = read_pages(0);
  copy.capacity = capacity_;
  copy.head_count = model_->spec().kv_head_count;
  copy.begin = whole_.FirstUnfilled(token_count);
  copy.end = std::max(copy.begin, std::min(token_count, whole_.end()));
  copy.row_bytes = model_->spec().row_bytes();
  whole_.SetFilled(token_count);
  return copy;
}

std::byte* const* LayerIndex::code_pages(int kv_head) const {
  return reinterpret_cast<std::byte* const*>(tables_.data()) +
         (model_->spec().kv_head_count + kv_head) * capacity_;
}

CudaSequence::CudaSequence(const CudaModel& model, BlockPools* blocks, Residency* residency)
    : model_(model), residency_(residency), copy_count_(model.spec().layer_count) {
  layers.reserve(model.spec().layer_count);
  for (int l = 0; l < model.spec().layer_count; ++l) layers.emplace_back(model, blocks, l);
  residency_->Add(*this);
}

CudaSequence::CudaSequence(const CudaModel& model, BlockPools* blocks, Residency* residency,
                           const CudaSequence& source, int64_t token_count)
    : model_(model), residency_(residency), copy_count_(model.spec().layer_count) {
  layers.reserve(source.layers.size());
  for (int l = 0; l < model.spec().layer_count; ++l) {
    layers.emplace_back(model, blocks, source.layers[l], token_count);
  }
  residency_->Add(*this);
}

int64_t CudaSequence::index_bytes() const {
  int64_t bytes = 0;
  for (const LayerIndex& layer : layers) bytes += layer.bytes();
  return bytes;
}

void CudaSequence::GiveUp() {
  for (LayerIndex& layer : layers) layer.whole().GiveUp();
}

int64_t CudaSequence::held_bytes() const {
  int64_t bytes = 0;
  for (const LayerIndex& layer : layers) bytes += layer.whole().bytes();
  return bytes;
}

int64_t CudaSequence::AheadPages(const CopyLayers& of) const {
  return &of == &model_.copy_layers() ? append_pages_.load(std::memory_order_relaxed) : 0;
}

void CudaSequence::ExpectAppends(int64_t count) {
  append_pages_ = PagesFor(std::min(count, kAheadTokensMax)) * model_.spec().kv_head_count;
}

absl::Status CudaSequence::Prepare(int layer, int64_t start, int64_t count) {
  LayerIndex& index = layers[layer];
  // Undoes an append that failed; usually nothing.
  index.Truncate(start);
  if (!model_.has_copies()) return index.Prepare(start, count);
  Trim();
  WholeRowsOfLayer& whole = index.whole();
  const int64_t page_count = whole.page_count();
  if (layer < copy_count_) {
    ResumeWhole(layer, start);
    bool may_lower = true;
    whole.Prepare(start, start + count,
                  [&] { return MakeRoom(layer, std::exchange(may_lower, false)); });
  } else {
    whole.Stop();
  }
  absl::Status status = index.Prepare(start, count);
  // Codes come first.
  while (absl::IsResourceExhausted(status) && MakeRoomForCodes()) {
    status = index.Prepare(start, count);
  }
  RETURN_IF_ERROR(status);
  if (layer > 0) return absl::OkStatus();
  const bool has_grown = whole.page_count() > page_count;
  if (has_grown) ExpectAppends(count);
  // If layers lack copies, there may be room now.
  const bool lacks = model_.copy_layers().count() < model_.spec().layer_count;
  if (has_grown || (lacks && model_.copy_layers().MayRise(model_.CopyPages(/*ahead=*/0)))) {
    FitCopies();
  }
  return absl::OkStatus();
}

void CudaSequence::FitCopies() {
  CopyLayers& all = model_.copy_layers();
  const auto pages = [&] { return model_.CopyPages(residency_->AheadPages(all)); };
  CopyLayers::Pages now = pages();
  // Idle sequences lose their copies first.
  while (!all.AllFit(now) && residency_->MakeRoom()) now = pages();
  all.Fit(now);
  Trim();
}

bool CudaSequence::Trim() {
  const int count = model_.copy_layers().count();
  std::vector<PageTable> taken;
  for (int layer = count; layer < copy_count_; ++layer) {
    std::ranges::move(layers[layer].whole().TakePages(), std::back_inserter(taken));
  }
  copy_count_ = count;
  return !taken.empty() && retired_.Retire(std::move(taken));
}

bool CudaSequence::MakeRoom(int layer, bool may_lower) {
  if (residency_->MakeRoom()) return true;
  CopyLayers& all = model_.copy_layers();
  return may_lower && all.Lower(model_.CopyPages(/*ahead=*/0)) && Trim() && layer < copy_count_;
}

bool CudaSequence::MakeRoomForCodes() {
  if (MakeRoomOfOthers()) return true;
  if (held_bytes() == 0) return false;
  while (model_.copy_layers().Lower(model_.CopyPages(/*ahead=*/0))) {
    if (Trim()) return true;
  }
  // While steps run, nothing would become free now.
  if (!retired_.idle()) return false;
  GiveUp();
  residency_->ForgetMoved(*this);
  return true;
}

absl::Status CudaSequence::Reserve(int layer, int64_t token_count) {
  absl::Status status = layers[layer].Reserve(token_count);
  while (absl::IsResourceExhausted(status) && MakeRoomOfOthers()) {
    status = layers[layer].Reserve(token_count);
  }
  return status;
}

bool CudaSequence::MakeRoomOfOthers() {
  return residency_->MakeRoom(/*idle=*/absl::ZeroDuration());
}

void CudaSequence::ResumeWhole(int layer, int64_t token_count) {
  // Asked for every layer, and seldom yes.
  const int64_t of_layer = layers[layer].MissingBytes(token_count);
  if (of_layer == 0 || !Residency::HasMoved(*this, of_layer)) return;
  int64_t bytes = 0;  // read by attends over the link
  for (int l = 0; l < copy_count_; ++l) bytes += layers[l].MissingBytes(token_count);
  if (!residency_->TakeTurn(*this, bytes)) return;
  for (int l = 0; l < copy_count_; ++l) layers[l].whole().Resume();
}

}  // namespace spillway::cuda

#include "engine/sequence.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "engine/caller.h"
#include "engine/errors.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

// Bytes of tables per page: its references in the tables of rows and of codes, with the slack of a
// growing vector.
constexpr int64_t kTableBytesPerPage = 4 * sizeof(PageRef);
// Tables are charged in steps, so that few appends touch the budget.
constexpr int64_t kTableStepBytes = 64 << 10;

int64_t RowBytes(const std::vector<LayerRows>& rows) {
  int64_t bytes = 0;
  for (const LayerRows& layer : rows) bytes += layer.bytes();
  return bytes;
}

}  // namespace

Sequence::Sequence(std::string id, std::shared_ptr<Model> model, std::shared_ptr<Account> account,
                   const Policy& policy, absl::Duration ttl, absl::Time create_time, SteadyTime now,
                   const Origin& origin, std::shared_ptr<const UnnamedGrace> grace)
    : id(std::move(id)),
      name("sequences/" + std::string(ClientIdOf(this->id))),
      model(std::move(model)),
      account(std::move(account)),
      policy(policy),
      ttl(ttl),
      named(origin.named),
      client(origin.client == nullptr ? "" : origin.client->id),
      trace(origin.trace),
      create_time(create_time),
      grace_(std::move(grace)),
      last_use_(now) {
  users_.Note(origin.client);
  this->model->sequence_count.fetch_add(1, std::memory_order_relaxed);
}

Sequence::~Sequence() { Clear(); }

int64_t Sequence::TableBytes(const ModelSpec& spec) {
  const int64_t heads = int64_t{spec.layer_count} * spec.kv_head_count;
  return static_cast<int64_t>(sizeof(Sequence)) + 1024 +
         spec.layer_count * static_cast<int64_t>(2 * sizeof(LayerRows)) +
         heads * static_cast<int64_t>(2 * sizeof(PageTable) + spec.head_dim * sizeof(float));
}

void Sequence::Use(const std::shared_ptr<Presence>& client) {
  if (named) return;
  const MutexLock lock(mutex_);
  users_.Note(client);
}

bool Sequence::abandoned() const {
  if (named) return false;
  const MutexLock lock(mutex_);
  return users_.gone_time() < kNever;
}

SteadyTime Sequence::grace_end() const {
  if (named) return kNever;
  SteadyTime gone;
  {
    const MutexLock lock(mutex_);
    gone = users_.gone_time();
  }
  // If a client keeps no connection, the grace time begins again with each of its calls.
  return After(std::max(gone, last_use_time()), grace_->time());
}

SequenceSnapshot Sequence::snapshot() const {
  const MutexLock lock(mutex_);
  return snapshot_;
}

int64_t Sequence::token_count() const {
  int64_t count = rows.empty() ? 0 : rows.front().token_count();
  for (const LayerRows& layer : rows) count = std::min(count, layer.token_count());
  return count;
}

absl::Status Sequence::ReserveTables(MemoryBudget& budget) {
  int64_t reserved = 0;
  for (const MemoryReservation& reservation : table_reservations_) reserved += reservation.bytes();
  const int64_t needed =
      TableBytes(model->spec) + RowBytes(rows) / model->row_pool.page_bytes() * kTableBytesPerPage;
  if (needed <= reserved) return absl::OkStatus();
  const int64_t step = reserved == 0 ? 0 : kTableStepBytes;
  ASSIGN_OR_RETURN(MemoryReservation more,
                   budget.Reserve(std::max(needed - reserved, step),
                                  "the page tables of a sequence", MemoryUse::kTables));
  table_reservations_.push_back(std::move(more));
  return absl::OkStatus();
}

absl::Status Sequence::Charge() {
  // Without a limit, it is enough that Publish() updates the account.
  if (account->quota().bytes_max == 0) return absl::OkStatus();
  const int64_t bytes = RowBytes(rows) + device->index_bytes();
  RETURN_IF_ERROR(account->Charge(bytes - charged_bytes_));
  charged_bytes_ = bytes;
  return absl::OkStatus();
}

void Sequence::Settle(int64_t held_bytes) {
  account->Settle(held_bytes - charged_bytes_);
  charged_bytes_ = held_bytes;
}

void Sequence::Clear() {
  device.reset();
  rows.clear();
  record.reset();
  table_reservations_.clear();
  Settle(0);
  if (counted_) model->sequence_count.fetch_sub(1, std::memory_order_relaxed);
  counted_ = false;
}

absl::Status Sequence::Check() const { return deleted() ? SequenceNotFound(name) : failure; }

absl::Status Sequence::CheckOpen() const {
  RETURN_IF_ERROR(Check());
  return sealed ? SequenceSealed(name) : absl::OkStatus();
}

void Sequence::PublishRecord() {
  SequenceSnapshot now;
  now.token_count = std::numeric_limits<int64_t>::max();
  for (int layer = 0; layer < record->layer_count(); ++layer) {
    const int64_t count = record->layer(layer).token_count();
    now.layer_token_counts.push_back(count);
    now.token_count = std::min(now.token_count, count);
  }
  now.generation = generation;
  now.row_bytes = RowBytes(rows);
  Settle(now.row_bytes);
  const MutexLock lock(mutex_);
  snapshot_ = std::move(now);
}

void Sequence::Publish() {
  SequenceSnapshot now;
  now.layer_token_counts.reserve(rows.size());
  for (const LayerRows& layer : rows) now.layer_token_counts.push_back(layer.token_count());
  now.token_count = token_count();
  now.generation = generation;
  now.row_bytes = RowBytes(rows);
  now.index_bytes = device == nullptr ? 0 : device->index_bytes();
  now.sealed = sealed;
  Settle(now.row_bytes + now.index_bytes);
  const MutexLock lock(mutex_);
  snapshot_ = std::move(now);
}

}  // namespace spillway

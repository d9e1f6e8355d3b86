#include "engine/presence.h"

#include <algorithm>

#include "absl/strings/string_view.h"

namespace spillway {

std::shared_ptr<Presence> PresenceTable::Of(std::string_view id, SteadyTime now) {
  const MutexLock lock(mutex_);
  const auto found = clients_.find(absl::string_view(id.data(), id.size()));
  if (found != clients_.end()) {
    if (std::shared_ptr<Presence> known = found->second.lock()) return known;
    clients_.erase(found);
  }
  constexpr size_t kCountMin = 64;
  if (clients_.size() >= 2 * cleared_count_ + kCountMin) {
    absl::erase_if(clients_, [](const auto& entry) { return entry.second.expired(); });
    cleared_count_ = clients_.size();
  }
  auto made = std::make_shared<Presence>(std::string(id), now);
  clients_.emplace(made->id, made);
  return made;
}

void PresenceTable::Come(Presence& client) {
  const MutexLock lock(mutex_);
  if (client.connection_count_++ > 0) return;
  ++there_count_;
  client.gone_.store(kNever, std::memory_order_relaxed);
}

void PresenceTable::Go(Presence& client, SteadyTime now) {
  const MutexLock lock(mutex_);
  if (frozen_ || --client.connection_count_ > 0) return;
  --there_count_;
  client.gone_.store(now, std::memory_order_relaxed);
}

void PresenceTable::Freeze() {
  const MutexLock lock(mutex_);
  frozen_ = true;
}

int64_t PresenceTable::there_count() const {
  const MutexLock lock(mutex_);
  return there_count_;
}

void SequenceUsers::Note(const std::shared_ptr<Presence>& client) {
  if (client == nullptr) {
    unknown_ = true;
    return;
  }
  if (unknown_ || std::find(clients_.begin(), clients_.end(), client) != clients_.end()) return;
  const auto earlier = [](const auto& a, const auto& b) { return a->gone_time() < b->gone_time(); };
  const auto is_gone = [](const auto& user) { return user->gone_time() < kNever; };
  if (std::count_if(clients_.begin(), clients_.end(), is_gone) >=
      static_cast<std::ptrdiff_t>(kGoneCountMax)) {
    const auto first = std::min_element(clients_.begin(), clients_.end(), earlier);
    // It may have connected again meanwhile.
    const SteadyTime gone = (*first)->gone_time();
    if (gone < kNever) {
      forgotten_ = std::max(forgotten_, gone);
      clients_.erase(first);
    }
  }
  clients_.push_back(client);
}

SteadyTime SequenceUsers::gone_time() const {
  if (unknown_) return kNever;
  SteadyTime last = forgotten_;
  for (const std::shared_ptr<Presence>& client : clients_) {
    last = std::max(last, client->gone_time());
  }
  return last;
}

}  // namespace spillway

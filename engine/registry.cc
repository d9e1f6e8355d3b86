#include "engine/registry.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/caller.h"
#include "engine/errors.h"

namespace spillway {
namespace {

constexpr size_t kIdLengthMax = 63;

bool IsAlphanumeric(char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); }

// These decide whether the next process that opens the store finds the sequence.
void List(Sequence& sequence) {
  if (sequence.record != nullptr) sequence.record->List();
}
void Unlist(Sequence& sequence) {
  if (sequence.record != nullptr) sequence.record->Unlist();
}
// Records that a client without an id used it, and so keeps it. A sequence in the registry still
// has its record.
void Keep(Sequence& sequence) {
  if (sequence.record != nullptr) sequence.record->Mark();
}

// The first `count` items after `after` for which `pass` is true.
template <typename T, typename Pass>
Page<T> ListAfter(const std::map<std::string, std::shared_ptr<T>, std::less<>>& all,
                  std::string_view after, int64_t count, const Pass& pass) {
  Page<T> page;
  for (auto it = all.upper_bound(after); it != all.end(); ++it) {
    if (!pass(*it->second)) continue;
    if (static_cast<int64_t>(page.items.size()) == count) {
      page.more = true;
      break;
    }
    page.items.push_back(it->second);
  }
  return page;
}

// The engine's id after which to list. `pass` must drop the ids of other namespaces that follow.
std::string After(std::string_view name_space, std::string_view after) {
  return name_space.empty() ? std::string(after)
                            : absl::StrCat(std::string(name_space), "/", std::string(after));
}

std::string ModelName(std::string_view id) { return "models/" + std::string(ClientIdOf(id)); }
std::string SequenceName(std::string_view id) { return "sequences/" + std::string(ClientIdOf(id)); }

}  // namespace

bool Registry::IsValidId(std::string_view id) {
  return !id.empty() && id.size() <= kIdLengthMax && IsAlphanumeric(id.front()) &&
         IsAlphanumeric(id.back()) && std::all_of(id.begin(), id.end(), [](char c) {
           return IsAlphanumeric(c) || c == '.' || c == '_' || c == '-';
         });
}

void Registry::SetCountMax(int64_t model_count_max, int64_t sequence_count_max) {
  const MutexLock lock(mutex_);
  model_count_max_ = model_count_max;
  sequence_count_max_ = sequence_count_max;
}

int64_t Registry::sequence_count_max() const {
  const MutexLock lock(mutex_);
  return sequence_count_max_;
}

absl::Status Registry::CheckNew(std::string_view id) const {
  if (models_.contains(id)) {
    const std::string name = ModelName(id);
    return WithReason(absl::AlreadyExistsError(absl::StrCat(name, " exists already")),
                      Reason::kModelExists, {{"name", name}});
  }
  if (static_cast<int64_t>(models_.size()) < model_count_max_) return absl::OkStatus();
  return WithReason(
      absl::ResourceExhaustedError(absl::StrCat("there are ", models_.size(),
                                                " models already, the limit models.count_max")),
      Reason::kModelCountExhausted, {{"model_count_max", absl::StrCat(model_count_max_)}});
}

absl::Status Registry::CheckNewModel(std::string_view id) const {
  const MutexLock lock(mutex_);
  return CheckNew(id);
}

absl::Status Registry::AddModel(std::shared_ptr<Model> model) {
  const MutexLock lock(mutex_);
  if (absl::Status status = CheckNew(model->id); !status.ok()) return status;
  if (model->record != nullptr) model->record->List();
  models_.emplace(model->id, std::move(model));
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Model>> Registry::FindModel(std::string_view id) const {
  const MutexLock lock(mutex_);
  const auto it = models_.find(id);
  if (it == models_.end()) return ModelNotFound(ModelName(id));
  return it->second;
}

absl::Status Registry::RemoveModel(std::string_view id) {
  std::shared_ptr<Model> removed;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  const auto it = models_.find(id);
  if (it == models_.end()) return ModelNotFound(ModelName(id));
  const SteadyTime now = clock_();
  const int64_t count = std::count_if(sequences_.begin(), sequences_.end(), [&](const auto& entry) {
    return entry.second->model == it->second && !HasExpired(*entry.second, now);
  });
  if (count > 0) {
    return WithReason(
        absl::FailedPreconditionError(absl::StrCat(it->second->name, " has ", count, " sequences")),
        Reason::kModelInUse, {{"name", it->second->name}, {"sequence_count", absl::StrCat(count)}});
  }
  removed = std::move(it->second);
  if (removed->record != nullptr) removed->record->Unlist();
  models_.erase(it);
  return absl::OkStatus();
}

Page<Model> Registry::ListModels(std::string_view after, int64_t count) const {
  const MutexLock lock(mutex_);
  return ListAfter<Model>(models_, after, count, [](const Model&) { return true; });
}

Page<Model> Registry::ListModelsOf(std::string_view name_space, std::string_view after,
                                   int64_t count) const {
  const MutexLock lock(mutex_);
  return ListAfter<Model>(models_, After(name_space, after), count,
                          [&](const Model& model) { return NamespaceOf(model.id) == name_space; });
}

absl::Status Registry::AddSequence(std::shared_ptr<Sequence> sequence) {
  std::shared_ptr<Sequence> expired;  // destroyed after the lock is released
  const MutexLock lock(mutex_);
  const auto model = models_.find(sequence->model->id);
  if (model == models_.end() || model->second != sequence->model) {
    return ModelNotFound(sequence->model->name);
  }
  const auto it = sequences_.find(sequence->id);
  if (it != sequences_.end()) {
    if (!HasExpired(*it->second, clock_())) {
      return WithReason(absl::AlreadyExistsError(absl::StrCat(sequence->name, " exists already")),
                        Reason::kSequenceExists, {{"name", sequence->name}});
    }
    expired = std::exchange(it->second, std::move(sequence));
    Unlist(*expired);
    List(*it->second);
    return absl::OkStatus();
  }
  if (static_cast<int64_t>(sequences_.size()) >= sequence_count_max_) {
    return WithReason(
        absl::ResourceExhaustedError(absl::StrCat(
            "there are ", sequences_.size(), " sequences already, the limit sequences.count_max")),
        Reason::kSequenceCountExhausted,
        {{"sequence_count_max", absl::StrCat(sequence_count_max_)}});
  }
  if (absl::Status status = sequence->account->AddSequence(); !status.ok()) return status;
  List(*sequence);
  sequences_.emplace(sequence->id, std::move(sequence));
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Sequence>> Registry::FindSequence(std::string_view id) const {
  const MutexLock lock(mutex_);
  return Find(id, clock_());
}

absl::StatusOr<std::shared_ptr<Sequence>> Registry::UseSequence(
    std::string_view id, const std::shared_ptr<Presence>& client) const {
  const MutexLock lock(mutex_);
  const SteadyTime now = clock_();
  absl::StatusOr<std::shared_ptr<Sequence>> sequence = Find(id, now);
  if (!sequence.ok()) return sequence;
  (*sequence)->Use(client);
  if (client == nullptr) Keep(**sequence);
  (*sequence)->Renew(now);
  return sequence;
}

absl::StatusOr<std::shared_ptr<Sequence>> Registry::Find(std::string_view id,
                                                         SteadyTime now) const {
  const auto it = sequences_.find(id);
  if (it == sequences_.end() || HasExpired(*it->second, now)) {
    return SequenceNotFound(SequenceName(id));
  }
  return it->second;
}

absl::StatusOr<std::shared_ptr<Sequence>> Registry::TakeSequence(std::string_view id,
                                                                 const Sequence* only) {
  const MutexLock lock(mutex_);
  const auto it = sequences_.find(id);
  if (it == sequences_.end() || HasExpired(*it->second, clock_()) ||
      (only != nullptr && it->second.get() != only)) {
    return SequenceNotFound(SequenceName(id));
  }
  std::shared_ptr<Sequence> sequence = std::move(it->second);
  Unlist(*sequence);
  sequence->account->RemoveSequence();
  sequences_.erase(it);
  return sequence;
}

std::vector<std::shared_ptr<Sequence>> Registry::TakeExpired(SteadyTime now) {
  std::vector<std::shared_ptr<Sequence>> expired;
  const MutexLock lock(mutex_);
  for (auto it = sequences_.begin(); it != sequences_.end();) {
    if (HasExpired(*it->second, now)) {
      Unlist(*it->second);
      it->second->account->RemoveSequence();
      expired.push_back(std::move(it->second));
      it = sequences_.erase(it);
    } else {
      ++it;
    }
  }
  return expired;
}

Page<Sequence> Registry::ListSequences(const Model* model, std::string_view after,
                                       int64_t count) const {
  const MutexLock lock(mutex_);
  const SteadyTime now = clock_();
  return ListAfter<Sequence>(sequences_, after, count, [&](const Sequence& sequence) {
    return (model == nullptr || sequence.model.get() == model) && !HasExpired(sequence, now);
  });
}

Page<Sequence> Registry::ListSequencesOf(std::string_view name_space, const Model* model,
                                         std::string_view after, int64_t count) const {
  const MutexLock lock(mutex_);
  const SteadyTime now = clock_();
  return ListAfter<Sequence>(
      sequences_, After(name_space, after), count, [&](const Sequence& sequence) {
        return NamespaceOf(sequence.id) == name_space &&
               (model == nullptr || sequence.model.get() == model) && !HasExpired(sequence, now);
      });
}

int64_t Registry::sequence_count() const {
  const MutexLock lock(mutex_);
  return static_cast<int64_t>(sequences_.size());
}

}  // namespace spillway

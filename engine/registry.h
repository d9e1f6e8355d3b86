#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/sequence.h"
#include "host/base/mutex.h"
#include "host/base/steady_time.h"

namespace spillway {

// A part of a list that is ordered by id.
template <typename T>
struct Page {
  std::vector<std::shared_ptr<T>> items;
  bool more = false;  // more items follow the last one
};

// The models and sequences that can be found by name, by the engine's ids (caller.h). What is
// removed stays alive while operations hold it. Thread-safe.
class Registry {
 public:
  using Clock = std::function<SteadyTime()>;
  // is_idle: whether no operation uses a sequence or waits for it. A sequence that is in use does
  // not expire.
  Registry(int64_t model_count_max, int64_t sequence_count_max, Clock clock,
           std::function<bool(const Sequence&)> is_idle)
      : clock_(std::move(clock)),
        is_idle_(std::move(is_idle)),
        model_count_max_(model_count_max),
        sequence_count_max_(sequence_count_max) {}

  // Existing models and sequences beyond the new limits stay.
  void SetCountMax(int64_t model_count_max, int64_t sequence_count_max) ABSL_LOCKS_EXCLUDED(mutex_);
  int64_t sequence_count_max() const ABSL_LOCKS_EXCLUDED(mutex_);

  // Whether a client may choose this id: [a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?.
  static bool IsValidId(std::string_view id);

  // ALREADY_EXISTS if the id is taken, RESOURCE_EXHAUSTED at the limit of models.
  absl::Status CheckNewModel(std::string_view id) const;
  // Adds the model. Errors as CheckNewModel().
  absl::Status AddModel(std::shared_ptr<Model> model);
  // NOT_FOUND, reason MODEL_NOT_FOUND.
  absl::StatusOr<std::shared_ptr<Model>> FindModel(std::string_view id) const;
  // NOT_FOUND; FAILED_PRECONDITION while the registry has sequences of it that have not expired.
  absl::Status RemoveModel(std::string_view id);
  // Up to count models whose id follows `after`, ordered by id.
  Page<Model> ListModels(std::string_view after, int64_t count) const;
  // The same, but only those of a namespace; `after` is a client's id.
  Page<Model> ListModelsOf(std::string_view name_space, std::string_view after,
                           int64_t count) const;

  // ALREADY_EXISTS if a sequence that has not expired has the id, NOT_FOUND if its model was
  // removed, RESOURCE_EXHAUSTED at the limit of sequences or at the quota of its account.
  absl::Status AddSequence(std::shared_ptr<Sequence> sequence);
  // NOT_FOUND, reason SEQUENCE_NOT_FOUND, also if it has expired. Does not renew its ttl.
  absl::StatusOr<std::shared_ptr<Sequence>> FindSequence(std::string_view id) const;
  // The same, for a client that uses it (Sequence::Use()). Renews its ttl.
  absl::StatusOr<std::shared_ptr<Sequence>> UseSequence(
      std::string_view id, const std::shared_ptr<Presence>& client) const;
  // Removes the sequence and returns it. NOT_FOUND, also if `only` is not null and another sequence
  // has the id.
  absl::StatusOr<std::shared_ptr<Sequence>> TakeSequence(std::string_view id,
                                                         const Sequence* only = nullptr);
  // Removes and returns all sequences that have expired by `now`.
  std::vector<std::shared_ptr<Sequence>> TakeExpired(SteadyTime now);
  // Up to count sequences whose id follows `after`, ordered by id; of one model unless `model` is
  // null. Leaves out expired sequences, and renews none.
  Page<Sequence> ListSequences(const Model* model, std::string_view after, int64_t count) const;
  // The same, but only those of a namespace; `after` is a client's id.
  Page<Sequence> ListSequencesOf(std::string_view name_space, const Model* model,
                                 std::string_view after, int64_t count) const;
  int64_t sequence_count() const;

 private:
  absl::StatusOr<std::shared_ptr<Sequence>> Find(std::string_view id, SteadyTime now) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckNew(std::string_view id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasExpired(const Sequence& sequence, SteadyTime now) const {
    return sequence.expire_time() <= now && is_idle_(sequence);
  }

  const Clock clock_;
  const std::function<bool(const Sequence&)> is_idle_;
  mutable Mutex mutex_;
  int64_t model_count_max_ ABSL_GUARDED_BY(mutex_);
  int64_t sequence_count_max_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<Model>, std::less<>> models_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<Sequence>, std::less<>> sequences_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway

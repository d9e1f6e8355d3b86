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
#include "daemon/engine/sequence.h"
#include "host/base/mutex.h"

namespace spillway {

// A part of a list that is ordered by id.
template <typename T>
struct Page {
  std::vector<std::shared_ptr<T>> items;
  bool more = false;  // others follow the last item
};

// The models and sequences that can be named, by the engine's ids (caller.h). Thread-safe. What it
// removes lives on while operations hold it.
class Registry {
 public:
  using Clock = std::function<absl::Time()>;
  Registry(int64_t model_count_max, int64_t sequence_count_max, Clock clock)
      : clock_(std::move(clock)),
        model_count_max_(model_count_max),
        sequence_count_max_(sequence_count_max) {}

  // What is there beyond them stays.
  void SetCountMax(int64_t model_count_max, int64_t sequence_count_max) ABSL_LOCKS_EXCLUDED(mutex_);
  int64_t sequence_count_max() const ABSL_LOCKS_EXCLUDED(mutex_);

  // Whether a client's `id` may name something: [a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?.
  static bool IsValidId(std::string_view id);

  // ALREADY_EXISTS when the id is taken, RESOURCE_EXHAUSTED at the most models.
  absl::Status CheckNewModel(std::string_view id) const;
  // The same, with the model listed where it is OK.
  absl::Status AddModel(std::shared_ptr<Model> model);
  // NOT_FOUND, reason MODEL_NOT_FOUND.
  absl::StatusOr<std::shared_ptr<Model>> FindModel(std::string_view id) const;
  // NOT_FOUND; FAILED_PRECONDITION while sequences of it are listed.
  absl::Status RemoveModel(std::string_view id);
  // Up to count models whose id is after `after`, by id.
  Page<Model> ListModels(std::string_view after, int64_t count) const;
  // Those of a namespace alone; after is a client's id.
  Page<Model> ListModelsOf(std::string_view name_space, std::string_view after,
                           int64_t count) const;

  // ALREADY_EXISTS when the id is taken by a sequence that has not expired,
  // NOT_FOUND when its model is gone, RESOURCE_EXHAUSTED at the most
  // sequences, or its account's.
  absl::Status AddSequence(std::shared_ptr<Sequence> sequence);
  // Does not renew it. NOT_FOUND, reason SEQUENCE_NOT_FOUND, also for one that has expired.
  absl::StatusOr<std::shared_ptr<Sequence>> FindSequence(std::string_view id) const;
  // The same for a client that uses it (Sequence::Use), which renews its ttl.
  absl::StatusOr<std::shared_ptr<Sequence>> UseSequence(
      std::string_view id, const std::shared_ptr<Presence>& client) const;
  // Takes it out of the list and returns it. NOT_FOUND, also where `only` is not null and another
  // sequence has the id.
  absl::StatusOr<std::shared_ptr<Sequence>> TakeSequence(std::string_view id,
                                                         const Sequence* only = nullptr);
  // Takes out all that expired and have nothing running by `is_idle`.
  std::vector<std::shared_ptr<Sequence>> TakeExpired(
      const std::function<bool(const Sequence&)>& is_idle);
  // Up to count sequences whose id is after `after`, by id; of one model
  // unless `model` is null. Does not renew, leaves out what has expired.
  Page<Sequence> ListSequences(const Model* model, std::string_view after, int64_t count) const;
  // Those of a namespace alone; after is a client's id.
  Page<Sequence> ListSequencesOf(std::string_view name_space, const Model* model,
                                 std::string_view after, int64_t count) const;
  int64_t sequence_count() const;

 private:
  absl::StatusOr<std::shared_ptr<Sequence>> Find(std::string_view id, absl::Time now) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckNew(std::string_view id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Clock clock_;
  mutable Mutex mutex_;
  int64_t model_count_max_ ABSL_GUARDED_BY(mutex_);
  int64_t sequence_count_max_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<Model>, std::less<>> models_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<Sequence>, std::less<>> sequences_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace spillway

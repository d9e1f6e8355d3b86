#pragma once

#include <cstdint>
#include <map>

namespace spillway {

// Chooses whose turn is next if several owners wait: the first arrival of the owner that was served
// the longest ago. So an owner with much work delays only itself. With one owner this is the order
// of arrival. Stores a number for each owner. Not thread-safe.
class FairOrder {
 public:
  // Chooses the next element of `waiting`, which is in order of arrival. Its owner then counts as
  // served. owner_of(*at) returns an int64_t. REQUIRES: `waiting` is not empty.
  template <typename List, typename OwnerOf>
  typename List::iterator Next(List& waiting, const OwnerOf& owner_of) {
    auto next = waiting.begin();
    for (auto at = next; at != waiting.end(); ++at) {
      if (served_[owner_of(*at)] < served_[owner_of(*next)]) next = at;
    }
    Served(owner_of(*next));
    return next;
  }
  // Counts an owner as served that did not have to wait.
  void Served(int64_t owner) { served_[owner] = ++turn_; }

 private:
  std::map<int64_t, uint64_t> served_;  // by owner: the last turn in which it was served
  uint64_t turn_ = 0;
};

}  // namespace spillway

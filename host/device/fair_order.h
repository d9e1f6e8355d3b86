#pragma once

#include <cstdint>
#include <map>

namespace spillway {

// Whose turn is next where several owners wait: of who was served the longest ago, the first that
// came. Who has much to do waits for itself. With one owner that is the order of arrival. Keeps a
// number for each owner. Not thread-safe.
class FairOrder {
 public:
  // One that waits, of those in `waiting`, in the order of arrival; it counts as served.
  // owner_of(*at) is an int64_t. REQUIRES: one waits.
  template <typename List, typename OwnerOf>
  typename List::iterator Next(List& waiting, const OwnerOf& owner_of) {
    auto next = waiting.begin();
    for (auto at = next; at != waiting.end(); ++at) {
      if (served_[owner_of(*at)] < served_[owner_of(*next)]) next = at;
    }
    Served(owner_of(*next));
    return next;
  }
  // One of this owner was served without waiting.
  void Served(int64_t owner) { served_[owner] = ++turn_; }

 private:
  std::map<int64_t, uint64_t> served_;  // the last turn of each
  uint64_t turn_ = 0;
};

}  // namespace spillway

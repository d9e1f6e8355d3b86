#pragma once

#include <atomic>
#include <cstdint>

namespace spillway {

// How many layers of a model's sequences have copies of all their rows in a device's memory, if
// not all copies fit: the first ones, and the same of all sequences. So an attend of a layer finds
// either all rows of all its sequences there, and can be dense, or none (docs/adr/0078).
// Thread-safe.
class CopyLayers {
 public:
  // Pages of rows.
  struct Pages {
    int64_t of_first = 0;   // that the copies of the first layer have, of all sequences
    int64_t of_others = 0;  // that those of the other layers have
    // That the other layers can get, if the first one takes no more. Negative if copies have
    // memory that others need.
    int64_t free = 0;
    int64_t ahead = 0;  // that a layer may need before all sequences know of a change
  };

  explicit CopyLayers(int layer_count) : layer_count_(layer_count), count_(layer_count) {}

  // Layers [0, count()) have copies. At least 1.
  int count() const { return count_.load(std::memory_order_relaxed); }
  // Whether there is room for copies of all layers.
  bool AllFit(const Pages& pages) const { return Fitting(pages, 0) >= layer_count_; }
  // Whether Fit() may give layers their copies back. Ahead need not be known.
  bool MayRise(const Pages& pages) const {
    return count() < layer_count_ && Fitting(pages, kSpareShare) > count();
  }
  // After the first layer's copies have grown. Layers lose their copies before room ends, and get
  // them back when there is an eighth more room than they need.
  void Fit(const Pages& pages);
  // There is no room for a copy. Returns whether one layer less has copies from now on: not if the
  // layers that lost them before have not given their room up yet.
  bool Lower(const Pages& pages);

 private:
  // The layers for whose copies there is room, with a share of 1 / spare_share to spare unless that
  // is 0.
  static int64_t Fitting(const Pages& pages, int64_t spare_share);
  static constexpr int64_t kSpareShare = 8;

  const int layer_count_;
  std::atomic<int> count_;
};

}  // namespace spillway

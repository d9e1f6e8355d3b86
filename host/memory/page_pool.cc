#include "host/memory/page_pool.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cassert>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "host/base/mutex.h"
#include "host/base/status_macros.h"

namespace spillway {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int kWordBits = 64;

int64_t RoundUp(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

[[noreturn]] void Die(const char* what, PageRef page) {
  std::fprintf(stderr, "page pool: %s of stale page %u, generation %u\n", what, page.index,
               page.generation);
  std::abort();
}

// Generation and reference count of a page in one word, so that the last release also ends the
// generation: no reference can be added in between.
struct State {
  uint32_t generation;
  uint32_t reference_count;

  static State Unpack(uint64_t word) {
    return {static_cast<uint32_t>(word >> 32), static_cast<uint32_t>(word)};
  }
  uint64_t Pack() const { return uint64_t{generation} << 32 | reference_count; }
  bool Holds(PageRef page) const { return reference_count > 0 && generation == page.generation; }
};

uint32_t NextGeneration(uint32_t generation) {
  // 0 means "no page".
  return generation == std::numeric_limits<uint32_t>::max() ? 1 : generation + 1;
}

}  // namespace

// How pages lie in slabs, and their states.
struct PageStates::Impl {
  Impl(Arena* arena, int64_t page_bytes);

  // The states of a slab's pages; null if no pool has ever held the slab.
  std::atomic<uint64_t>* Of(uint32_t slab) const {
    return slab_states[slab].load(std::memory_order_acquire);
  }
  void Ensure(uint32_t slab) ABSL_LOCKS_EXCLUDED(mutex);

  int64_t slab_count = 1;
  int64_t pages_per_slab = 0;
  int shift = 0;
  uint32_t slab_capacity = 0;
  // [slab_capacity]. Null until a pool first holds that slab, then never changed, so that stale
  // references find their state.
  std::unique_ptr<std::atomic<std::atomic<uint64_t>*>[]> slab_states;

  Mutex mutex;
  std::vector<std::unique_ptr<std::atomic<uint64_t>[]>> owned ABSL_GUARDED_BY(mutex);
};

PageStates::Impl::Impl(Arena* arena, int64_t page_bytes) {
  constexpr int64_t kWasteShare = 64;
  slab_count = (page_bytes + kSlabBytes - 1) / kSlabBytes;
  while (slab_count * kSlabBytes % page_bytes * kWasteShare > slab_count * kSlabBytes) ++slab_count;
  pages_per_slab = slab_count * kSlabBytes / page_bytes;
  shift = static_cast<int>(std::bit_width(static_cast<uint64_t>(pages_per_slab - 1)));
  slab_capacity =
      static_cast<uint32_t>(std::min(arena->slab_capacity(), int64_t{1} << (32 - shift)));
  slab_states = std::make_unique<std::atomic<std::atomic<uint64_t>*>[]>(slab_capacity);
}

void PageStates::Impl::Ensure(uint32_t slab) {
  const MutexLock lock(mutex);
  if (slab_states[slab].load(std::memory_order_relaxed) != nullptr) return;
  owned.push_back(std::make_unique<std::atomic<uint64_t>[]>(pages_per_slab));
  slab_states[slab].store(owned.back().get(), std::memory_order_release);
}

PageStates::PageStates(Arena* arena, int64_t page_bytes)
    : impl_(std::make_unique<Impl>(arena, RoundUp(page_bytes, kAlignment))) {}

PageStates::~PageStates() = default;

// A page's index is its slab's number in the arena, shifted, plus its place in the slab. So its
// address needs no table that could move while another thread reads it.
struct PagePool::Impl {
  // Which pages of a slab are free.
  class FreePlaces {
   public:
    explicit FreePlaces(int64_t count)
        : count_(count), words_((count + kWordBits - 1) / kWordBits, ~uint64_t{0}) {
      if (count % kWordBits != 0) words_.back() = (uint64_t{1} << (count % kWordBits)) - 1;
    }
    int64_t count() const { return count_; }
    // Takes the first free place at or after `from`, else the first of all.
    // REQUIRES: count() > 0.
    int64_t Take(int64_t from) {
      int64_t place = Find(from);
      if (place < 0) place = Find(0);
      assert(place >= 0);
      TakeAt(place);
      return place;
    }
    // REQUIRES: the place is free.
    void TakeAt(int64_t place) {
      words_[place / kWordBits] &= ~(uint64_t{1} << (place % kWordBits));
      --count_;
    }
    void Give(int64_t place) {
      words_[place / kWordBits] |= uint64_t{1} << (place % kWordBits);
      ++count_;
    }

   private:
    int64_t Find(int64_t from) const {
      for (size_t w = static_cast<size_t>(from / kWordBits); w < words_.size(); ++w) {
        uint64_t word = words_[w];
        if (static_cast<int64_t>(w) == from / kWordBits) word &= ~uint64_t{0} << (from % kWordBits);
        if (word != 0) return static_cast<int64_t>(w) * kWordBits + std::countr_zero(word);
      }
      return -1;
    }

    int64_t count_;
    std::vector<uint64_t> words_;
  };

  Impl(Arena* arena, int64_t page_bytes, SlabLimit* limit, PageStates::Impl* states)
      : arena(arena),
        limit(limit),
        page_bytes(page_bytes),
        states(states),
        slab_count(states->slab_count),
        pages_per_slab(states->pages_per_slab),
        shift(states->shift),
        slab_capacity(states->slab_capacity) {}

  uint32_t SlabOf(PageRef page) const { return page.index >> shift; }
  int64_t PlaceOf(PageRef page) const { return page.index & ((uint32_t{1} << shift) - 1); }
  std::byte* SlabBase(uint32_t slab) const { return arena->base() + slab * kSlabBytes; }
  // The page's state; null if the pool never had a page with this index.
  std::atomic<uint64_t>* StateOf(PageRef page) const {
    const uint32_t slab = SlabOf(page);
    const int64_t place = PlaceOf(page);
    if (slab >= slab_capacity || place >= pages_per_slab) return nullptr;
    std::atomic<uint64_t>* of_slab = states->Of(slab);
    return of_slab == nullptr ? nullptr : &of_slab[place];
  }
  // Chooses the slab to take a page from: the neighbour's, else another with a free page, else a
  // new one.
  absl::StatusOr<uint32_t> ChooseSlab(PageRef neighbour) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void FreePage(PageRef page);
  // Adds a slab to the pool. All of its pages are free.
  void AddSlab(uint32_t slab) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Gives slabs that the pool no longer holds back to the arena.
  void GiveBack(std::byte* base);

  Arena* const arena;
  SlabLimit* const limit;
  const int64_t page_bytes;
  PageStates::Impl* const states;
  const int64_t slab_count;
  const int64_t pages_per_slab;
  const int shift;
  const uint32_t slab_capacity;

  mutable Mutex mutex;
  absl::flat_hash_map<uint32_t, FreePlaces> slabs ABSL_GUARDED_BY(mutex);  // held now
  std::set<uint32_t> with_room ABSL_GUARDED_BY(mutex);
  // Written under the lock.
  std::atomic<int64_t> used_page_count = 0;
  std::atomic<int64_t> held_page_count = 0;  // of all slabs
};

absl::StatusOr<uint32_t> PagePool::Impl::ChooseSlab(PageRef neighbour) {
  if (neighbour) {
    const auto it = slabs.find(SlabOf(neighbour));
    if (it != slabs.end() && it->second.count() > 0) return it->first;
  }
  if (!with_room.empty()) return *with_room.begin();
  if (limit != nullptr && !limit->Take(slab_count)) {
    return arena->Exhausted("a page", page_bytes, 0);
  }
  const absl::StatusOr<std::byte*> base = arena->AllocateSlabs(slab_count);
  if (!base.ok()) {
    if (limit != nullptr) limit->Give(slab_count);
    if (!absl::IsResourceExhausted(base.status())) return base.status();
    return arena->Exhausted("a page", page_bytes, 0);
  }
  const int64_t slab = (*base - arena->base()) / kSlabBytes;
  if (slab >= slab_capacity) {
    GiveBack(*base);
    return absl::ResourceExhaustedError("the page pool has used all of its page indices");
  }
  const auto id = static_cast<uint32_t>(slab);
  AddSlab(id);
  return id;
}

void PagePool::Impl::AddSlab(uint32_t slab) {
  states->Ensure(slab);
  slabs.emplace(slab, FreePlaces(pages_per_slab));
  with_room.insert(slab);
  held_page_count += pages_per_slab;
}

void PagePool::Impl::GiveBack(std::byte* base) {
  arena->FreeSlabs(base, slab_count);
  if (limit != nullptr) limit->Give(slab_count);
}

void PagePool::Impl::FreePage(PageRef page) {
  const MutexLock lock(mutex);
  const uint32_t slab = SlabOf(page);
  const auto it = slabs.find(slab);
  it->second.Give(PlaceOf(page));
  --used_page_count;
  if (it->second.count() < pages_per_slab) {
    with_room.insert(slab);
    return;
  }
  with_room.erase(slab);
  slabs.erase(it);
  held_page_count -= pages_per_slab;
  GiveBack(SlabBase(slab));
}

PagePool::PagePool(Arena* arena, int64_t page_bytes, SlabLimit* limit,
                   std::shared_ptr<PageStates> states)
    : page_bytes_(RoundUp(page_bytes, kAlignment)),
      states_(states != nullptr ? std::move(states)
                                : std::make_shared<PageStates>(arena, page_bytes)),
      impl_(std::make_unique<Impl>(arena, page_bytes_, limit, states_->impl_.get())) {}

PagePool::~PagePool() {
  const MutexLock lock(impl_->mutex);
  for (const auto& [slab, places] : impl_->slabs) impl_->GiveBack(impl_->SlabBase(slab));
}

absl::StatusOr<PageRef> PagePool::Allocate(PageRef neighbour) {
  const MutexLock lock(impl_->mutex);
  ASSIGN_OR_RETURN(const uint32_t slab, impl_->ChooseSlab(neighbour));
  Impl::FreePlaces& places = impl_->slabs.at(slab);
  const bool beside = neighbour && impl_->SlabOf(neighbour) == slab;
  const int64_t place = places.Take(beside ? impl_->PlaceOf(neighbour) + 1 : 0);
  if (places.count() == 0) impl_->with_room.erase(slab);
  ++impl_->used_page_count;

  PageRef page{slab << impl_->shift | static_cast<uint32_t>(place), 0};
  std::atomic<uint64_t>& state = *impl_->StateOf(page);
  page.generation = State::Unpack(state.load(std::memory_order_relaxed)).generation;
  if (page.generation == 0) page.generation = 1;
  state.store(State{page.generation, 1}.Pack(), std::memory_order_release);
  return page;
}

absl::StatusOr<SlabRun> PagePool::SlabsOf(uint32_t index) const {
  const PageRef page{index, 0};
  if (impl_->PlaceOf(page) >= impl_->pages_per_slab) {
    return absl::DataLossError(absl::StrCat("page ", index, " would be the ", impl_->PlaceOf(page),
                                            "th of ", impl_->pages_per_slab));
  }
  return SlabRun{impl_->SlabOf(page), impl_->slab_count};
}

absl::StatusOr<PageRef> PagePool::Adopt(uint32_t index) {
  ASSIGN_OR_RETURN(const SlabRun run, SlabsOf(index));
  if (run.first + run.count > impl_->slab_capacity) {
    return absl::DataLossError(
        absl::StrCat("page ", index, " is in slab ", run.first, " of ", impl_->slab_capacity));
  }
  PageRef page{index, 0};
  const MutexLock lock(impl_->mutex);
  const uint32_t slab = impl_->SlabOf(page);
  if (!impl_->slabs.contains(slab)) impl_->AddSlab(slab);
  std::atomic<uint64_t>& state = *impl_->StateOf(page);
  State now = State::Unpack(state.load(std::memory_order_relaxed));
  if (now.reference_count == 0) {
    Impl::FreePlaces& places = impl_->slabs.at(slab);
    places.TakeAt(impl_->PlaceOf(page));
    if (places.count() == 0) impl_->with_room.erase(slab);
    ++impl_->used_page_count;
    if (now.generation == 0) now.generation = 1;
  }
  ++now.reference_count;
  page.generation = now.generation;
  state.store(now.Pack(), std::memory_order_release);
  return page;
}

void PagePool::AddReference(PageRef page) {
  std::atomic<uint64_t>* state = impl_->StateOf(page);
  if (state == nullptr) Die("AddReference", page);
  uint64_t word = state->load(std::memory_order_relaxed);
  do {
    if (!State::Unpack(word).Holds(page)) Die("AddReference", page);
  } while (!state->compare_exchange_weak(word, word + 1, std::memory_order_relaxed));
}

void PagePool::Release(PageRef page) {
  std::atomic<uint64_t>* state = impl_->StateOf(page);
  if (state == nullptr) Die("Release", page);
  uint64_t word = state->load(std::memory_order_relaxed);
  State next;
  do {
    next = State::Unpack(word);
    if (!next.Holds(page)) Die("Release", page);
    if (--next.reference_count == 0) next.generation = NextGeneration(next.generation);
    // Release: this thread's reads of the page come before its reuse. Acquire: so do those of the
    // other threads, if this is the last reference.
  } while (!state->compare_exchange_weak(word, next.Pack(), std::memory_order_acq_rel,
                                         std::memory_order_relaxed));
  if (next.reference_count == 0) impl_->FreePage(page);
}

bool PagePool::IsShared(PageRef page) const {
  const std::atomic<uint64_t>* state = impl_->StateOf(page);
  if (state == nullptr) Die("IsShared", page);
  // Acquire: a sole owner may write, after the reads of earlier owners.
  const State now = State::Unpack(state->load(std::memory_order_acquire));
  if (!now.Holds(page)) Die("IsShared", page);
  return now.reference_count > 1;
}

std::byte* PagePool::Data(PageRef page) const {
  const std::atomic<uint64_t>* state = impl_->StateOf(page);
  if (state == nullptr || !State::Unpack(state->load(std::memory_order_acquire)).Holds(page)) {
    return nullptr;
  }
  return impl_->SlabBase(impl_->SlabOf(page)) + impl_->PlaceOf(page) * page_bytes_;
}

int64_t PagePool::BytesToExtentEnd(const std::byte* data) const {
  return impl_->arena->BytesToExtentEnd(data);
}

void PagePool::Copy(std::byte* to, const std::byte* from) {
  impl_->arena->Copy(to, from, page_bytes_);
}

int64_t PagePool::used_page_count() const {
  return impl_->used_page_count.load(std::memory_order_relaxed);
}

int64_t PagePool::spare_page_count() const {
  return impl_->held_page_count.load(std::memory_order_relaxed) - used_page_count();
}

int64_t PagePool::free_page_count() const {
  int64_t bytes = impl_->arena->free_bytes();
  if (impl_->limit != nullptr) bytes = std::clamp<int64_t>(impl_->limit->free_bytes(), 0, bytes);
  return spare_page_count() + bytes / (impl_->slab_count * kSlabBytes) * impl_->pages_per_slab;
}

absl::Status PagePool::Exhausted(std::string_view what, int64_t needed_pages) const {
  int64_t needed_bytes = 0;
  if (__builtin_mul_overflow(needed_pages, page_bytes_, &needed_bytes)) {
    needed_bytes = std::numeric_limits<int64_t>::max();
  }
  return impl_->arena->Exhausted(what, needed_bytes, free_page_count() * page_bytes_);
}

int64_t PagePool::pages_per_slab() const { return impl_->pages_per_slab; }

int64_t PagePool::slab_count() const { return impl_->slab_count; }

}  // namespace spillway

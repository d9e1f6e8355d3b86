#pragma once

#include <cstddef>

#include "host/cpu/kernels.h"
#include "host/cpu/key_index.h"
#include "host/model/model_spec.h"

namespace spillway {

// Writes the bounds (KeySections) of each page of quest_page_token_count tokens that has one of the
// keys. They are bounds of all keys of that page below keys.end. Thread-safe.
void StoreBounds(const ModelSpec& spec, const PageKeys& keys, std::byte* section);

// Upper limits of logits by the bounds of page_count pages of keys, in nats, for each key:
// [G][128]. All keys of a page have the same: sum_c max(q_c low_c, q_c high_c), summed in channel
// order (Quest, arXiv 2406.10774, algorithm 1). Thread-safe.
void BoundLogits(DType dtype, const RowQueries& queries, int page_count, const std::byte* section,
                 float* logits);

}  // namespace spillway

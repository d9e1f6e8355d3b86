#pragma once

#include <cstddef>

#include "host/cpu/kernels.h"
#include "host/cpu/key_index.h"
#include "host/model/model_spec.h"

namespace spillway {

// Writes the bounds (KeySections) of the pages that have one of the keys: of all
// the page's keys below keys.end. Thread-safe.
void StoreBounds(const ModelSpec& spec, const PageKeys& keys, std::byte* section);

// The largest logits that the bounds of page_count pages of keys allow, for
// each of their keys, [G][128]: sum_c max(q_c low_c, q_c high_c) (Quest, arXiv
// 2406.10774, algorithm 1), in channel order. Thread-safe.
void BoundLogits(DType dtype, const RowQueries& queries, int page_count, const std::byte* section,
                 float* logits);

}  // namespace spillway

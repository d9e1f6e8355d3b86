#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "host/core/page_index.h"
#include "host/cpu/kernels.h"
#include "host/model/model_spec.h"

// The page index of host/core/page_index.h on the CPU. A page's rows [K | V]
// lie next to each other, row_bytes apart. Thread-safe.
namespace spillway {

// Fills centre, codes and factors of a closed page of one KV head, but not its
// norms. params.centre is not read. radii: [kPageTokenCount] of its keys about
// the centre.
void EncodePage(const ModelSpec& spec, EncodeParams params, const std::byte* rows, std::byte* page,
                float* radii);

// What stays of a KV head's first kCentreTokenCount rows.
struct FirstRows {
  HeadStatistics statistics;
  std::vector<float> value_centre;  // [d]
};
// pages: their kCentreTokenCount / kPageTokenCount pages of rows; radii:
// [kCentreTokenCount] of EncodePage().
FirstRows MeasureFirstRows(const ModelSpec& spec, std::span<const std::byte* const> pages,
                           const float* radii);

// The norms of a page that EncodePage() has filled, from its radii.
void WriteNorms(const ModelSpec& spec, const CodeLayout& layout, const FirstRows& first,
                const std::byte* rows, const float* radii, std::byte* page);

}  // namespace spillway

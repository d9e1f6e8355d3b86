#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "host/core/page_index.h"
#include "host/cpu/kernels.h"
#include "host/model/model_spec.h"

// Computes the page index of host/core/page_index.h on the CPU. The rows [K | V] of a page are
// adjacent, row_bytes apart. Thread-safe.
namespace spillway {

// Computes the centre, codes and factors of a closed page of one KV head, but not its norms.
// params.centre is not read. radii: [kPageTokenCount], the distances of its keys from the centre.
void EncodePage(const ModelSpec& spec, EncodeParams params, const std::byte* rows, std::byte* page,
                float* radii);

// The value centre of a page, and the distances of its values from it.
struct PageValues {
  std::vector<float> centre;  // [d]
  float distances[kPageTokenCount];
};
PageValues MeasureValues(const ModelSpec& spec, const std::byte* rows);

// Writes the value codes, value factors and value centre of a page. REQUIRES: the layout has value
// codes.
void EncodeValues(const ModelSpec& spec, const EncodeParams& params, const PageValues& values,
                  const std::byte* rows, std::byte* page);

// What is kept of a KV head's first kCentreTokenCount rows.
struct FirstRows {
  HeadStatistics statistics;
  std::vector<float> value_centre;  // [d]; the first value centre
};
// pages: the kFirstPageCount pages of these rows. radii: [kCentreTokenCount] of EncodePage().
FirstRows MeasureFirstRows(std::span<const PageValues> pages, const float* radii);

// Writes the norms of a page that EncodePage() has filled, from its radii.
void WriteNorms(const CodeLayout& layout, const FirstRows& first, const PageValues& values,
                const float* radii, std::byte* page);

}  // namespace spillway

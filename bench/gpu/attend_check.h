#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "host/base/selection.h"
#include "host/memory/layer_rows.h"
#include "host/model/model_spec.h"

// References for attends: attention of one query [H_q][d] in fp64, computed on all cores. Results
// are [H_q][d].
namespace spillway::bench {

// Attention over the first n rows of each KV head.
std::vector<double> DenseAttention(const ModelSpec& spec, const LayerRows& rows,
                                   std::span<const float> q, int64_t n);

// Attention over the selected rows of each KV head. The log weight of a row is added to its logit.
std::vector<double> SelectedAttention(const ModelSpec& spec, const LayerRows& rows,
                                      std::span<const float> q,
                                      std::span<const Selection> selections);

// Per query head: ||out - wanted|| / ||wanted||.
std::vector<double> RelativeErrors(const ModelSpec& spec, std::span<const float> out,
                                   std::span<const double> wanted);

}  // namespace spillway::bench

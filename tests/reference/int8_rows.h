#pragma once

#include <vector>

#include "tests/reference/trace.h"

namespace spillway::reference {

// A vector as rows of 8 bits hold it, from the definition in host/base/int8_row.h. high_count: its
// elements with a high part.
std::vector<float> StoredVector(const std::vector<float>& x, int high_count, DType dtype);

// The context that a model with RowType::kInt8 attends to after `context` was appended. The same
// context if the model has other rows.
Context Stored(Context context);

}  // namespace spillway::reference

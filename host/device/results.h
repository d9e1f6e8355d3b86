#pragma once

#include <cstdint>

#include "host/device/device.h"

namespace spillway {

// Makes an attend's results as large as they will be.
void AllocateResults(const ModelSpec& spec, AttendWork& work);

// What is known of dense queries [begin, end) without reading a row: their
// certificates, the rows they touch and, with select_only, their selections.
void FillDenseResults(const ModelSpec& spec, int64_t begin, int64_t end, AttendWork& work);

}  // namespace spillway

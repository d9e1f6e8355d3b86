#pragma once

#include <string>
#include <vector>

#include "tests/conformance/device_bench.h"

namespace spillway {

// The policy that attends to all rows.
Policy All();

// Expects that an attend to all rows is dense attention over the context, with the sinks of the
// layer, for every query and head, and that its certificates say so.
void ExpectDense(const reference::Context& context, const JobItem& item,
                 const std::vector<float>& q, const std::string& what, int layer = 0);

// Expects that a decode step gives what an append and an attend give, bit for bit. spec: of one
// layer.
void ExpectStepsAppendAndAttend(const DeviceFactory& device, const ModelSpec& spec);

}  // namespace spillway

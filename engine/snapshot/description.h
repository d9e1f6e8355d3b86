#pragma once

#include <string>

#include "host/model/model_spec.h"

namespace spillway {

// What determines a model's rows and codes: a JSON object for people and for comparison, with the
// member "name" and one for each field of the spec except the seed of the sample. Thread-safe.
std::string DescribeModel(const std::string& name, const ModelSpec& spec);

// The first member, other than "name", in which two descriptions differ, with both values; empty if
// there is none. REQUIRES: both are JSON objects.
std::string FirstDifference(const std::string& saved, const std::string& there);

}  // namespace spillway

#pragma once

#include <string>

#include "host/model/model_spec.h"

namespace spillway {

// What makes a model's rows and codes, a JSON object for people and to compare: member "name", and
// one for each field of the spec but the sample's seed. Thread-safe.
std::string DescribeModel(const std::string& name, const ModelSpec& spec);

// The first member, other than "name", in which two descriptions differ, with both values;
// empty: none. REQUIRES: JSON objects.
std::string FirstDifference(const std::string& saved, const std::string& there);

}  // namespace spillway

#pragma once

#include <span>
#include <string>

#include "host/policy/method.h"

// The methods that a policy may name, a row each: the core's, and the
// optional ones (host/methods) that this build has. Whatever asks which there are, what
// one needs or what it is good for asks these tables. Thread-safe.
namespace spillway {

// Every row, in the enum's order.
std::span<const SelectorMethod* const> SelectorMethods();
std::span<const TailMethod* const> TailMethods();

// The row of a value; null: unknown, or not in this build.
const SelectorMethod* FindMethod(Selector selector);
const TailMethod* FindMethod(Tail tail);
// REQUIRES: there is such a row.
const SelectorMethod& MethodOf(Selector selector);
const TailMethod& MethodOf(Tail tail);

// As the API spells a value, SELECTOR_ASYMMETRIC; SELECTOR_ and its number if
// there is no such row.
std::string ApiName(Selector selector);
std::string ApiName(Tail tail);

// Whether this build runs policies with a first selection.
bool HasFirstSelection();

}  // namespace spillway

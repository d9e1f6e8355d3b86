#pragma once

#include <span>
#include <string>

#include "host/policy/method.h"

// Two tables of the methods that a policy may name: those of the core, and the optional ones
// (host/methods) of this build. Code that needs the list of methods, or a property of one, reads
// these tables. Thread-safe.
namespace spillway {

// All methods, in the order of the enum.
std::span<const SelectorMethod* const> SelectorMethods();
std::span<const TailMethod* const> TailMethods();

// The method of an enum value; null if the value is unknown or its method is not in this build.
const SelectorMethod* FindMethod(Selector selector);
const TailMethod* FindMethod(Tail tail);
// REQUIRES: the method exists.
const SelectorMethod& MethodOf(Selector selector);
const TailMethod& MethodOf(Tail tail);

// The name of an enum value in the API, such as SELECTOR_ASYMMETRIC. If there is no such method:
// SELECTOR_ or TAIL_ and the number.
std::string ApiName(Selector selector);
std::string ApiName(Tail tail);

// Whether this build supports policies with a first selection.
bool HasFirstSelection();

}  // namespace spillway

#pragma once

#include "host/policy/method.h"

namespace spillway {

// SELECTOR_QUEST: ranks keys by the bounds of pages of keys (arXiv 2406.10774).
extern const Method kQuestMethod;

}  // namespace spillway

#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Returns an absl::Status from the function unless it is OK.
#define RETURN_IF_ERROR(expression)                                                         \
  do {                                                                                      \
    if (absl::Status return_if_error_status = (expression); !return_if_error_status.ok()) { \
      return return_if_error_status;                                                        \
    }                                                                                       \
  } while (false)

// Returns the status of an absl::StatusOr<T> from the function unless it is OK. Otherwise moves the
// value to `target`, which may be a declaration:
//   ASSIGN_OR_RETURN(std::unique_ptr<Lane> lane, Lane::Create());
// Must be a statement of its own, not the body of an if.
#define ASSIGN_OR_RETURN(target, expression) \
  SPILLWAY_ASSIGN_OR_RETURN(SPILLWAY_JOIN(status_or_, __LINE__), target, expression)

// NOLINTBEGIN(bugprone-macro-parentheses): a declaration has none.
#define SPILLWAY_ASSIGN_OR_RETURN(result, target, expression) \
  auto result = (expression);                                 \
  if (!result.ok()) return std::move(result).status();        \
  target = *std::move(result)
// NOLINTEND(bugprone-macro-parentheses)
#define SPILLWAY_JOIN(a, b) SPILLWAY_JOIN_EXPANDED(a, b)
#define SPILLWAY_JOIN_EXPANDED(a, b) a##b

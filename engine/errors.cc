#include "engine/errors.h"

#include <algorithm>
#include <optional>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "host/memory/memory_budget.h"

namespace spillway {
namespace {

constexpr absl::string_view kReason = "spillway/reason";
constexpr absl::string_view kMetadata = "spillway/metadata/";
// Followed by a number, which keeps the order, a slash and the field's path.
constexpr absl::string_view kField = "spillway/field/";
constexpr int kFieldNumberWidth = 4;

absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

}  // namespace

absl::Status WithMessage(const absl::Status& status, std::string_view message) {
  absl::Status other(status.code(), View(message));
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& value) { other.SetPayload(url, value); });
  return other;
}

absl::Status WithReason(absl::Status status, Reason reason,
                        const std::vector<std::pair<std::string, std::string>>& metadata) {
  status.SetPayload(kReason, absl::Cord(View(NameOf(reason))));
  return WithMetadata(std::move(status), metadata);
}

absl::Status WithMetadata(absl::Status status,
                          const std::vector<std::pair<std::string, std::string>>& metadata) {
  for (const auto& [key, value] : metadata) {
    status.SetPayload(absl::StrCat(kMetadata, key), absl::Cord(value));
  }
  return status;
}

absl::Status WithFields(absl::Status status, const std::vector<FieldError>& fields) {
  int number = 0;
  for (const FieldError& field : fields) {
    status.SetPayload(
        absl::StrFormat("%s%0*d/%s", kField, kFieldNumberWidth, number++, field.field),
        absl::Cord(field.description));
  }
  return status;
}

absl::Status InvalidFields(const std::vector<FieldError>& fields) {
  std::string message;
  for (const FieldError& field : fields) {
    absl::StrAppend(&message, message.empty() ? "" : "; ", field.field, ": ", field.description);
  }
  return WithFields(WithReason(absl::InvalidArgumentError(message), Reason::kInvalidField), fields);
}

absl::Status InvalidField(std::string field, std::string description) {
  return InvalidFields({{std::move(field), std::move(description)}});
}

absl::Status ModelNotFound(std::string_view name) {
  return WithReason(absl::NotFoundError(absl::StrCat("there is no model ", View(name))),
                    Reason::kModelNotFound, {{"name", std::string(name)}});
}

absl::Status SequenceNotFound(std::string_view name) {
  return WithReason(absl::NotFoundError(absl::StrCat("there is no sequence ", View(name),
                                                     "; it may have been deleted or have expired")),
                    Reason::kSequenceNotFound, {{"name", std::string(name)}});
}

absl::Status SequenceHeld(std::string_view name) {
  return WithReason(
      absl::FailedPreconditionError(absl::StrCat(View(name),
                                                 " is held by an open decoder, and other requests "
                                                 "for it are refused: close the decoder first")),
      Reason::kSequenceHeld, {{"name", std::string(name)}});
}

absl::Status SequenceSealed(std::string_view name) {
  return WithReason(
      absl::FailedPreconditionError(absl::StrCat(
          View(name),
          " is sealed: it cannot be appended to or truncated until SealSequence opens it again")),
      Reason::kSequenceSealed, {{"name", std::string(name)}});
}

absl::Status SequenceNotSealed(std::string_view name) {
  return WithReason(absl::FailedPreconditionError(
                        absl::StrCat(View(name),
                                     " is not sealed, and if_sealed is set: another client may "
                                     "have opened it, or the daemon has restarted since")),
                    Reason::kSequenceNotSealed, {{"name", std::string(name)}});
}

ErrorDetails DetailsOf(const absl::Status& status) {
  ErrorDetails details;
  std::vector<std::pair<std::string, FieldError>> fields;
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& value) {
    if (url == kReason) {
      details.reason = std::string(value);
    } else if (absl::StartsWith(url, kMetadata)) {
      details.metadata.emplace_back(absl::StripPrefix(url, kMetadata), std::string(value));
    } else if (absl::StartsWith(url, kField)) {
      const absl::string_view rest = absl::StripPrefix(url, kField);
      fields.push_back({std::string(rest.substr(0, kFieldNumberWidth)),
                        {std::string(rest.substr(kFieldNumberWidth + 1)), std::string(value)}});
    } else if (url == View(kNeededFreePayload)) {
      const std::string text(value);
      const size_t space = text.find(' ');
      details.metadata.emplace_back("needed_bytes", text.substr(0, space));
      details.metadata.emplace_back("free_bytes", text.substr(space + 1));
      if (details.reason.empty()) details.reason = NameOf(Reason::kMemoryExhausted);
    } else if (url == View(kMemoryLimitPayload)) {
      const std::string text(value);
      const size_t space = text.find(' ');
      details.metadata.emplace_back("limit_bytes", text.substr(0, space));
      details.metadata.emplace_back("limit_setting", text.substr(space + 1));
    }
  });
  std::sort(fields.begin(), fields.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  for (auto& [number, field] : fields) details.fields.push_back(std::move(field));
  std::sort(details.metadata.begin(), details.metadata.end());
  return details;
}

}  // namespace spillway

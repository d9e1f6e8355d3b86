#pragma once

#include <string_view>

namespace spillway {

// Why a request was refused. The values are those of v1::Reason, where each is explained; the
// engine knows no protobuf. Reasons that only clients give are not here.
enum class Reason {
  kInvalidField = 1,
  kMessageUnreadable = 2,
  kNonFinite = 3,
  kResponseTooLarge = 4,
  kModelNotFound = 10,
  kModelExists = 11,
  kModelNotReady = 12,
  kModelInUse = 13,
  kModelCountExhausted = 14,
  kWeightsNotAwaited = 15,
  kUploadUnderWay = 16,
  kSequenceNotFound = 20,
  kSequenceExists = 21,
  kSequenceCountExhausted = 22,
  kSequenceHeld = 23,
  kSequenceSealed = 24,
  kSequenceNotSealed = 25,
  kStaleGeneration = 26,
  kTokenStartOutOfRange = 30,
  kRowsDiffer = 31,
  kTokenCountOutOfRange = 32,
  kTokenOutOfRange = 33,
  kQueryCountOutOfRange = 34,
  kVisibleTokenCountOutOfRange = 35,
  kNoSnapshotFolder = 40,
  kSnapshotNotFound = 41,
  kSnapshotBusy = 42,
  kSnapshotModelDiffers = 43,
  kSnapshotVersion = 44,
  kNotASnapshot = 45,
  kMemoryExhausted = 50,
  kQuotaExhausted = 51,
  kStreamCountExhausted = 52,
  kStreamIdle = 53,
  kCallThreadsExhausted = 54,
  kThreadsExhausted = 55,
  kSessionNotFound = 60,
  kRegionNotFound = 61,
  kRegionCountExhausted = 62,
  kDoorbellCountExhausted = 63,
  kTokenMissing = 70,
  kTokenUnknown = 71,
  kTokenRevoked = 72,
  kMetricsOfAll = 73,
  kDraining = 80,
  kStopping = 81,
};

// The name without REASON_, for example "SEQUENCE_NOT_FOUND".
std::string_view NameOf(Reason reason);

}  // namespace spillway

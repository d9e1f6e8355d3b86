#pragma once

namespace spillway {

// Whether the libraries of this program read connections through shielded_reads.cc. False if the
// linker or another library has taken its place.
bool ReadsAreShielded();

}  // namespace spillway

#pragma once

#include <optional>
#include <string>

namespace spillway::bench {

// A PCI Express link between a GPU and its host.
struct PcieLink {
  // What device and system could do together.
  int generation_max = 0;
  int width_max = 0;  // lanes
  // What the link runs at now; an idle one may have stepped down.
  int generation = 0;
  int width = 0;
};

// Bytes a second that the lanes carry each way after line coding, before
// packet headers: no transfer is faster. 0 for a generation that is not known.
constexpr double PcieBytesPerSecond(int generation, int width) {
  constexpr double kGigabit = 1e9 / 8;
  double lane = 0;
  switch (generation) {
    case 1:
      lane = 2.5 * kGigabit * 8 / 10;
      break;
    case 2:
      lane = 5 * kGigabit * 8 / 10;
      break;
    case 3:
      lane = 8 * kGigabit * 128 / 130;
      break;
    case 4:
      lane = 16 * kGigabit * 128 / 130;
      break;
    case 5:
      lane = 32 * kGigabit * 128 / 130;
      break;
    case 6:  // flits of 256 bytes carry 236 of packets
      lane = 64 * kGigabit * 236 / 256;
      break;
    default:
      break;
  }
  return lane * width;
}

// The link as the driver's management library (NVML) reports it, which is
// loaded for the call. Nothing where library, GPU or answer are missing:
// virtual machines often hide the link.
std::optional<PcieLink> ReadPcieLink(const std::string& pci_bus_id);

}  // namespace spillway::bench

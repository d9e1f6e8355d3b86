#pragma once

#include <optional>
#include <string>

namespace spillway::bench {

// A PCI Express link between a GPU and its host.
struct PcieLink {
  // The maximum that the device and the system both support.
  int generation_max = 0;
  int width_max = 0;  // lanes
  // The current state. An idle link may have a lower generation or width.
  int generation = 0;
  int width = 0;
};

// Bytes per second in each direction, after line coding and before packet headers. No transfer is
// faster than this. 0 for an unknown generation.
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
    case 6:  // of each flit's 256 bytes, 236 are packets
      lane = 64 * kGigabit * 236 / 256;
      break;
    default:
      break;
  }
  return lane * width;
}

// The link as NVML, the driver's management library, reports it. The library is loaded for this
// call. Returns nothing if the library, the GPU or an answer is missing; virtual machines often
// hide the link.
std::optional<PcieLink> ReadPcieLink(const std::string& pci_bus_id);

}  // namespace spillway::bench

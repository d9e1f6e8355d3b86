// A library for LD_PRELOAD that makes the GPU unusable for a process for good, as a bug in a kernel
// does. Whenever the file that SPILLWAY_FAULT names appears, the library removes it, and a kernel
// writes to an invalid address.
#include <cuda_runtime.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace {

__global__ void WriteNowhere() { *reinterpret_cast<volatile int*>(0x10) = 1; }

void WaitAndFault(const char* file) {
  for (;;) {
    while (unlink(file) != 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    WriteNowhere<<<1, 1>>>();
    std::fprintf(stderr, "fault: %s\n", cudaGetErrorName(cudaDeviceSynchronize()));
  }
}

[[maybe_unused]] const bool started = [] {
  if (const char* const file = std::getenv("SPILLWAY_FAULT")) {
    std::thread(WaitAndFault, file).detach();
  }
  return true;
}();

}  // namespace

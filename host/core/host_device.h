#pragma once

// Marks a function that kernels call too. Such functions use no library but
// <cmath>'s and <bit>'s plain functions and take no references to constants.
#ifdef __CUDACC__
#define SPILLWAY_HOST_DEVICE __host__ __device__
#else
#define SPILLWAY_HOST_DEVICE
#endif

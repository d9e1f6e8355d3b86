#pragma once

// Marks a function that kernels call too. Such a function uses only plain functions of <cmath> and
// <bit>, and binds no reference to a constant.
#ifdef __CUDACC__
#define SPILLWAY_HOST_DEVICE __host__ __device__
#else
#define SPILLWAY_HOST_DEVICE
#endif

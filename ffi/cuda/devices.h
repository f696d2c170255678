// The machine's GPUs, without a context on any: whether kernels can run there must be known before.
#pragma once

#include <vector>

namespace gradops {

struct FoundDevices {
  std::vector<int> architectures;  // of each GPU: 10 * major + minor
  int driver;                      // the CUDA version that the driver knows; 0: there is no driver
  int runtime;                     // the one that the kernels were built with
};

FoundDevices FindDevices();  // cuda/devices.cu

}  // namespace gradops

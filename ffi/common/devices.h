// Finds the machine's GPUs without creating a context. Whether kernels can run on a GPU must be
// known before there is a context.
#pragma once

#include <vector>

namespace gradops {

struct FoundDevices {
  std::vector<int> architectures;  // of each GPU: 10 * major + minor
  int driver;                      // the CUDA version that the driver supports; 0: no driver
  int runtime;                     // the CUDA version that the kernels were built with
};

FoundDevices FindDevices();  // cuda/common/devices.cu

}  // namespace gradops

#include "common/devices.h"

#include <cuda_runtime_api.h>

namespace gradops {

FoundDevices FindDevices() {
  FoundDevices found{};
  int count = 0;
  if (cudaDriverGetVersion(&found.driver) != cudaSuccess) found.driver = 0;
  if (cudaRuntimeGetVersion(&found.runtime) != cudaSuccess) found.runtime = 0;
  if (found.driver == 0 || cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  for (int device = 0; device < count; ++device) {
    int major = 0, minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess) {
      found.architectures.push_back(10 * major + minor);
    }
  }
  cudaGetLastError();  // no later launch should report an error from here
  return found;
}

}  // namespace gradops
